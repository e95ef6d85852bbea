"""syncfree_ext: with the weight gradient accumulated at float32 grade, and in the dtype of the weight ("lean")."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Call, Maker

PACKAGE = "syncfree_ext"
DEVICES = ("cpu", "cuda")


def _default(device: torch.device, rows: int | None) -> Call:
    from syncfree_ext import linear_cross_entropy

    def call(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return linear_cross_entropy(x, w, t, chunk_rows=rows)  # type: ignore[return-value]

    return call


def _lean(device: torch.device, rows: int | None) -> Call:
    from syncfree_ext import linear_cross_entropy

    def call(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return linear_cross_entropy(x, w, t, chunk_rows=rows, accum_dtype=w.dtype)  # type: ignore[return-value]

    return call


HEADS: dict[str, Maker] = {"syncfree": _default, "syncfree-lean": _lean}
