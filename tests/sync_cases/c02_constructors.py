"""pytorch#120996: four constructors that copy from pageable memory."""

import torch
from common import busy, device, steps

like = torch.zeros(2, device=device)
on_host = torch.zeros(2)
for _ in steps():
    busy()
    torch.tensor([1.0, 2.0], device=device)  # FIND: pageable copy
    torch.as_tensor([1.0, 2.0], device=device)  # FIND: pageable copy
    like.new_tensor([1.0, 2.0])  # FIND: pageable copy
    on_host.to(device)  # FIND: pageable copy
