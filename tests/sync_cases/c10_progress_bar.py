"""Lightning#21232: a value is converted for a progress bar that is off."""

import torch
from common import busy, device, steps

shown: dict[str, float] = {}
loss = torch.ones((), device=device)


def log(name: str, value: torch.Tensor) -> None:
    shown[name] = float(value)  # FIND: scalar read


for _ in steps():
    busy()
    log("loss", loss)
