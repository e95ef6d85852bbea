"""One axis at a time from the first shape given: rows 1k to 64k, classes 32k to 256k, hidden size 1k to 8k."""

from __future__ import annotations

import torch

from bench import heads
from bench.context import Context
from bench.shapes import Shape

from .common import TRAIN, measure

HELP = "Time against the number of rows, of classes, and the hidden size."
_AXES = {
    "BT": (1024, 2048, 4096, 8192, 16384, 32768, 65536),
    "V": (32000, 64000, 128256, 256000),
    "H": (1024, 2048, 4096, 8192),
}


def points(base: Shape) -> list[tuple[str, Shape]]:
    """(axis, shape) for every point, each shape once; a small base is only doubled twice along each axis."""
    axes = _AXES
    if base.flops < 1e12:
        axes = {axis: tuple(getattr(base, axis) * k for k in (1, 2, 4)) for axis in _AXES}
    found: list[tuple[str, Shape]] = []
    for axis, values in axes.items():
        for value in values:
            BT, H, V = (value if axis == name else getattr(base, name) for name in ("BT", "H", "V"))
            shape = Shape(f"{BT}x{H}x{V}", BT, H, V)
            if all(shape != other for _, other in found):
                found.append((axis, shape))
    return found


def run(ctx: Context) -> None:
    base = ctx.with_shapes("llama8b")[0]
    for dtype in ctx.with_dtypes(torch.bfloat16):
        for data in ctx.with_data("unit"):
            for axis, shape in points(base):
                measure(
                    ctx,
                    "scale",
                    shape,
                    ctx.heads or heads.parse("quick"),
                    dtype=dtype,
                    data=data,
                    variant=axis,
                    parts=(TRAIN,),
                    real_limit=False,
                    extra={"axis": axis, "base": base.name},
                )
