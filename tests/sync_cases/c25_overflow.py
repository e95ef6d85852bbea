"""DeepSpeed#5115: each gradient is asked for overflow."""

import torch
from common import busy, device, steps

gradients = [torch.ones(16, device=device) for _ in range(4)]


def overflows(gradient: torch.Tensor) -> bool:
    return bool(gradient.isinf().any())  # FIND: scalar read


for _ in steps():
    busy()
    for gradient in gradients:
        overflows(gradient)
