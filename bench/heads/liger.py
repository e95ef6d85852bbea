"""Liger-Kernel's fused linear cross-entropy: chunk sizes, accumulation dtypes, and its CuTe variant for sm_90."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .base import Call, Maker, UnavailableError, no_rows

PACKAGE = "liger-kernel"
DEVICES = ("cuda",)


def _triton(
    device: torch.device, rows: int | None, *, accum: torch.dtype | None = None, chunk_constant: int | None = None
) -> Call:
    no_rows("liger", rows)
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    # bias, class weights, ignore_index, z weight, smoothing, reduction, softcap, return z, accumulation dtype; then
    # token scaling, accuracy, predictions, two implementation switches and the constant that sizes the chunks.
    options: list[Any] = [None, None, -100, 0.0, 0.0, "mean", None, False, accum]
    if chunk_constant is not None:
        options += [False, False, False, None, None, chunk_constant]

    def call(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        loss: Tensor = Function.apply(x, w, t, *options)[0]
        return loss

    return call


def _sm90(device: torch.device, rows: int | None) -> Call:
    no_rows("liger-sm90", rows)
    if torch.cuda.get_device_capability(device) != (9, 0):
        raise UnavailableError("liger-sm90 runs on sm_90 only")
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        LigerFusedLinearCrossEntropySM90Function as Function,
    )

    def call(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        loss: Tensor = Function.apply(x, w, t)
        return loss

    return call


HEADS: dict[str, Maker] = {
    "liger": _triton,
    "liger-c8": functools.partial(_triton, chunk_constant=8),
    "liger-c16": functools.partial(_triton, chunk_constant=16),
    "liger-fp32": functools.partial(_triton, accum=torch.float32),
    "liger-c8-fp32": functools.partial(_triton, accum=torch.float32, chunk_constant=8),
    "liger-sm90": _sm90,
}
