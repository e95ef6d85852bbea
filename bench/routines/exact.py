"""Relative L2 error of loss, dX and dW against float64, on easy and on hard data, in 1 to 32 chunks."""

from __future__ import annotations

import torch

from bench import heads
from bench.context import Context
from bench.shapes import Shape

from .common import TRAIN, measure

HELP = "Errors of loss and gradients against float64, in 1 to 32 chunks."
CHUNKS = (1, 2, 4, 8, 16, 32)


def _chunked(shape: Shape) -> list[str]:
    rows = sorted({-(-shape.BT // chunks) for chunks in CHUNKS}, reverse=True)
    return [f"{name}@{r}" for name in heads.GROUPS["ours"] for r in rows]


def run(ctx: Context) -> None:
    for dtype in ctx.with_dtypes(torch.bfloat16):
        for shape in ctx.with_shapes("exact"):
            for data in ctx.with_data("unit", "confident", "trained_mean"):
                names = ctx.heads or [*_chunked(shape), *(n for n in heads.parse("all") if "@" not in n)]
                measure(ctx, "exact", shape, names, dtype=dtype, data=data, parts=(TRAIN,), timed=False)
