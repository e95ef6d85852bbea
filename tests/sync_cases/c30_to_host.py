"""Values that are taken to the host: lists, arrays, prints."""

import torch
from common import busy, device, steps

x = torch.ones(8, device=device)
for _ in steps():
    busy()
    x.tolist()  # FIND: pageable copy
    x.cpu().numpy()  # FIND: pageable copy
    torch.equal(x, x + 1)  # FIND: scalar read
    x.unique()  # FIND: dynamic shape
    x.repeat_interleave(torch.ones_like(x, dtype=torch.long))  # FIND: dynamic shape
    x.repeat_interleave(torch.ones_like(x, dtype=torch.long), output_size=8)
