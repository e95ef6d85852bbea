"""Cut cross-entropy (Apple): with its filter on small gradients, and exact."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .base import Call, Maker, no_rows

PACKAGE = "cut-cross-entropy"
DEVICES = ("cuda",)


def _make(device: torch.device, rows: int | None, *, variant: str) -> Call:
    no_rows(variant, rows)
    from cut_cross_entropy import linear_cross_entropy

    def call(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        loss: Tensor = linear_cross_entropy(x, w, t, impl=variant)
        return loss

    return call


HEADS: dict[str, Maker] = {
    "cce": functools.partial(_make, variant="cce"),
    "cce-exact": functools.partial(_make, variant="cce_exact"),
}
