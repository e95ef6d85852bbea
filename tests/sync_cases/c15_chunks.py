"""trl#6842: a chunked loss branches on a count of the device, and makes it the end of a range."""

import torch
from common import busy, device, steps

labels = torch.arange(64, device=device) - 100
for _ in steps():
    busy()
    valid = (labels != -100).sum()
    if valid == 0:  # FIND: scalar read
        continue
    for start in range(0, valid, 16):  # FIND: scalar read
        labels[start : start + 16].sum()
