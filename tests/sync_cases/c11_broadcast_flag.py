"""Lightning#21487: a flag is broadcast each step, and read. One rank is enough to show it."""

import torch
import torch.distributed as dist
from common import busy, device, steps

backend = "nccl" if device.type == "cuda" else "gloo"
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
flag = torch.zeros((), device=device)
try:
    for _ in steps():
        busy()
        dist.broadcast(flag, 0)
        if flag.item():  # FIND: scalar read
            break
finally:
    dist.destroy_process_group()
