"""vllm#53491: non_blocking does not help pageable memory; torch's sync-debug mode is silent, time shows it."""

import torch
from common import busy, device, steps

source = torch.ones(2**24)
target = torch.empty(2**24, device=device)
for _ in steps():
    busy(64)
    target.copy_(source, non_blocking=True)  # FIND: pageable copy
