"""Megatron-LM#7076: a hook on each gradient asks whether it holds a NaN, in backward."""

import torch
from common import busy, device, steps

model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False, device=device) for _ in range(4)))


def check(parameter: torch.Tensor) -> None:
    if parameter.grad.isnan().any():  # FIND: scalar read
        raise FloatingPointError


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(check)
x = torch.ones(4, 16, device=device)
for _ in steps():
    busy()
    model(x).sum().backward()
