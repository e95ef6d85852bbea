"""fairchem#2195: a mean over a mask for each task, each read back."""

import torch
from common import busy, device, steps

values = torch.arange(64.0, device=device)
tasks = torch.arange(64, device=device) % 15
for _ in steps():
    busy()
    for task in range(15):
        chosen = values[tasks == task]  # FIND: dynamic shape
        chosen.mean().item()  # FIND: scalar read
