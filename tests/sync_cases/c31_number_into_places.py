"""A number that is assigned through an index is copied to the device, as one for a single element is."""

import torch
from common import busy, device, steps

x = torch.zeros(64, device=device)
places = torch.arange(8, device=device)
for _ in steps():
    busy()
    x[places] = 1.0  # FIND: pageable copy
    x[3] = 1.0  # FIND: pageable copy
    x[:8] = 1.0
    x.index_fill_(0, places, 1.0)
