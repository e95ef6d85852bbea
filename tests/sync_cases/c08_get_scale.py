"""accelerate#1714: the scale is read to learn whether a step was skipped."""

import torch
from common import busy, device, steps

scaler = torch.amp.GradScaler(device.type)
scaler.scale(torch.ones((), device=device))
for _ in steps():
    busy()
    before = scaler.get_scale()  # FIND: scalar read
    skipped = scaler.get_scale() < before  # FIND: scalar read
