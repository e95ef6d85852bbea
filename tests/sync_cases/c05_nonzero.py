"""pytorch#62320, #131256: nonzero asks the device how long its result is; nonzero_static is told."""

import torch
from common import busy, device, steps

x = torch.arange(64, device=device) % 3
for _ in steps():
    busy()
    torch.nonzero_static(x, size=16)
    x.nonzero()[:16]  # FIND: dynamic shape
