"""A training loop that never waits: pinned batches, a clipped norm, a fused optimizer, masks without a count."""

import torch
import torch.nn.functional as F
from common import device

torch.manual_seed(0)
cuda = device.type == "cuda"
width = 512 if cuda else 16
model = torch.nn.Sequential(
    torch.nn.Embedding(1000, width), torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, 1000)
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
batches = [torch.randint(1000, (64, 65), pin_memory=cuda) for _ in range(4)]
total = torch.zeros((), device=device)
for index in range(220 if cuda else 12):
    tokens = batches[index % 4].to(device, non_blocking=True)
    x, y = tokens[:, :-1], tokens[:, 1:].masked_fill(tokens[:, 1:] < 100, -100)
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    total += loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
