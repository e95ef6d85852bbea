"""Advanced_Optimizers#5: a tensor as alpha is read to become a number."""

import torch
from common import busy, device, steps

gradient, weight = torch.ones(16, device=device), torch.ones(16, device=device)
decay = torch.full((), 0.1, device=device)
for _ in steps():
    busy()
    gradient.sub(weight, alpha=decay)  # FIND: scalar read
