"""torchtune#2076: pinned memory is allocated in the step."""

import torch
from common import busy, device, steps

for index in steps():
    busy()
    if device.type == "cuda":
        # A new size each time, so that torch's cache of pinned blocks cannot serve it.
        torch.empty(2**20 << index % 8, dtype=torch.uint8, pin_memory=True)  # FIND: allocator
