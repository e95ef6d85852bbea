"""minimind#835: a mixture of experts that asks each expert whether it has tokens, and which."""

import torch
from common import busy, device, steps

x = torch.ones(64, 8, device=device)
choice = torch.arange(64, device=device) % 4
for _ in steps():
    busy()
    for expert in range(4):
        mask = choice == expert
        if mask.any():  # FIND: scalar read
            rows = mask.nonzero()  # FIND: dynamic shape
            x[mask].sum()  # FIND: dynamic shape
