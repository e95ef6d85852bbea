"""What sync-debug mode does not see: devices, streams, events, and the cache of the allocator."""

import torch
from common import busy, device, steps

event = torch.Event(device) if device.type == "cpu" else torch.cuda.Event()
for _ in steps():
    busy()
    if device.type == "cuda":
        torch.cuda.synchronize()  # FIND: explicit
        busy()
        torch.cuda.current_stream().synchronize()  # FIND: explicit
        busy(64)
        event.record()
        event.synchronize()  # FIND: explicit
        torch.cuda.empty_cache()  # FIND: allocator
