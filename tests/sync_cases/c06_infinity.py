"""pytorch#143928: an attention mask with a -inf that is made on the host."""

import torch
from common import busy, device, steps

scores = torch.zeros(8, 8, device=device)
mask = torch.ones(8, 8, device=device, dtype=torch.bool).tril()
for _ in steps():
    busy()
    scores.masked_fill(~mask, -float("inf"))
    torch.where(mask, scores, torch.tensor(-float("inf"), device=device))  # FIND: pageable copy
