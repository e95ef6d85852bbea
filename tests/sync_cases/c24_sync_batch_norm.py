"""pytorch#36452: SyncBatchNorm keeps the ranks that have data, by a mask. It takes two ranks to get there."""

import torch
import torch.distributed as dist
from common import busy, steps

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
try:
    norm = torch.nn.SyncBatchNorm(8).cuda()
    x = torch.ones(4, 8, 4, 4, device="cuda", requires_grad=True)
    for _ in steps():
        busy()
        norm(x).sum().backward()  # FIND: dynamic shape
finally:
    dist.destroy_process_group()
