"""trl#6702: a filter of the log asks each step whether the loss is NaN or infinite."""

import torch
from common import busy, device, steps

loss = torch.ones((), device=device)
total = torch.zeros((), device=device)
for _ in steps():
    busy()
    if torch.isnan(loss) or torch.isinf(loss):  # FIND: scalar read
        total += total
    else:
        total += loss
