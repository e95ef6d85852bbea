"""torchmetrics#2638: a helper branches on its data to divide safely."""

import torch
from common import busy, device, steps

correct, total = torch.ones(8, device=device), torch.ones(8, device=device)


def divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if (b == 0).any():  # FIND: scalar read
        b = b.clamp_min(1)
    return a / b


for _ in steps():
    busy()
    divide(correct, total)
