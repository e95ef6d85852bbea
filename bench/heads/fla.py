"""flash-linear-attention's fused linear cross-entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Call, Maker, no_rows

PACKAGE = "fla-core"
DEVICES = ("cuda",)


def _make(device: torch.device, rows: int | None) -> Call:
    no_rows("fla", rows)
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

    def call(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        out = fused_linear_cross_entropy_loss(x, t, w)
        loss: Tensor = out[0] if isinstance(out, tuple) else out
        return loss

    return call


HEADS: dict[str, Maker] = {"fla": _make}
