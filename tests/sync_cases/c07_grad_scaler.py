"""pytorch#80167: GradScaler reads found_inf before an optimizer that is not fused."""

import torch
from common import busy, device, steps

model = torch.nn.Linear(16, 16, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device.type)
x = torch.ones(4, 16, device=device)
for _ in steps():
    busy()
    optimizer.zero_grad()
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)  # FIND: scalar read
    scaler.update()
