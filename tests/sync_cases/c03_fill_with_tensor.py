"""pytorch#109115: fill_ with a tensor reads it where the devices differ, inside the op. On one device it does not."""

import torch
from common import busy, device, steps

on_host = torch.zeros(4)
on_device = torch.zeros(4, device=device)
for _ in steps():
    busy(64)
    on_device.fill_(on_device.max())
    on_host.fill_(on_device.max())  # FIND: inside an op
