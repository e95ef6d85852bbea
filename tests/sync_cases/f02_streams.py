"""Streams that wait for each other, and copies between pinned memory and the device."""

import torch
from common import busy, device, steps

cuda = device.type == "cuda"
source = torch.ones(2**16, pin_memory=cuda)
target = torch.empty(2**16, device=device)
back = torch.empty(2**16, pin_memory=cuda)
side = torch.cuda.Stream() if cuda else None
for _ in steps(220 if cuda else 8):
    busy()
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
            target.mul_(2)
        torch.cuda.current_stream().wait_stream(side)
    target.add_(1)
    target.topk(8)
    target.sort()
    target.cumsum(0)
    target.index_fill_(0, torch.arange(8, device=device), 0.0)
    back.copy_(target, non_blocking=True)
