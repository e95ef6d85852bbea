"""pytorch#140296: an asynchronous copy to the host. Reading it early is a bug, but nothing waits: nothing is found."""

import torch
from common import busy, device, steps

x = torch.ones(2**20, device=device)
for _ in steps():
    busy()
    x.to("cpu", non_blocking=True)
