"""autoware-ml#122: slices whose bounds lie on the device."""

import torch
from common import busy, device, steps

x = torch.arange(64, device=device)
offsets = torch.arange(0, 65, 16, device=device)
for _ in steps():
    busy()
    for i in range(4):
        x[offsets[i] : offsets[i + 1]].sum()  # FIND: scalar read
