"""transformers#39213: each layer asks whether positions ascend."""

import torch
from common import busy, device, steps

positions = torch.arange(64, device=device)


def layer(p: torch.Tensor) -> int:
    if (p.diff() >= 0).all():  # FIND: scalar read
        return 1
    return 0


for _ in steps():
    busy()
    for _ in range(32):
        layer(positions)
