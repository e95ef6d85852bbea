"""pytorch#12461: x[mask] counts the mask on the host, in backward too; a masked fill does not."""

import torch
from common import busy, device, steps

x = torch.arange(64.0, device=device, requires_grad=True)
mask = torch.arange(64, device=device) % 3 == 0
for _ in steps():
    busy()
    filled = x.detach().clone()
    filled[mask] = 1.0
    kept = x[mask]  # FIND: dynamic shape # FIND BACKWARD: IndexBackward0
    kept.sum().backward()
