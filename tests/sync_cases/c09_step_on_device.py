"""pytorch#128208: after a resume Adam's step counters lie on the GPU, and each is read."""

import torch
from common import busy, device, steps

model = torch.nn.Linear(16, 16, device=device)
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
x = torch.ones(4, 16, device=device)
model(x).sum().backward()
optimizer.step()
for state in optimizer.state.values():
    state["step"] = state["step"].to(device)
for _ in steps():
    busy()
    optimizer.step()  # FIND: scalar read
