"""TransformerEngine#3268: a list is repeated by an element of the device."""

import torch
from common import busy, device, steps

lengths = torch.tensor([3, 4, 5], device=device)
for _ in steps():
    busy()
    for i in range(3):
        mask = [False] * lengths[i]  # FIND: scalar read
