"""Mixed precision and metrics that stay on the device until the loop is over."""

import torch
from common import device

cuda = device.type == "cuda"
width = 512 if cuda else 16
model = torch.nn.Linear(width, width, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
x = torch.ones(64, width, device=device)
sums = torch.zeros(3, device=device, dtype=torch.float64)
for _ in range(220 if cuda else 12):
    for _ in range(4):
        with torch.autocast(device.type, torch.bfloat16):
            out = model(x)
        loss = out.float().square().mean()
        loss.backward()
        bad = loss.detach().isfinite().logical_not()
        sums += torch.stack((loss.detach(), bad, torch.ones_like(loss))).double()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
