"""pytorch#190217: a scalar made from a Python number is a blocking copy; torch.full fills on the device."""

import torch
from common import busy, device, steps

for _ in steps():
    busy()
    torch.full((), 3.0, device=device)
    torch.tensor(3.0, device=device)  # FIND: pageable copy
