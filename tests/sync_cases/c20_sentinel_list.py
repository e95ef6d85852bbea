"""sglang#32575: a constant of one element is made from a list, for each batch."""

import torch
from common import busy, device, steps

ids = torch.arange(8, device=device)
for _ in steps():
    busy()
    torch.cat([ids, torch.tensor([-1], device=device)])  # FIND: pageable copy
