"""The same comparison on the CPU, in float32 and bfloat16."""

from __future__ import annotations

import torch

from bench import heads
from bench.context import Context

from .common import measure

HELP = "The heads that run on the CPU, in float32 and bfloat16."


def run(ctx: Context) -> None:
    if ctx.device.type != "cpu":
        ctx.echo("cpu: skipped, this routine needs --device cpu")
        return
    for shape in ctx.with_shapes("cpu"):
        for data in ctx.with_data("unit"):
            for dtype in ctx.with_dtypes(torch.float32, torch.bfloat16):
                names = ctx.heads or heads.parse("cpu")
                if dtype == torch.float32:
                    names = [n for n in names if n != "torch-fp32"]  # the same as torch
                measure(ctx, "cpu", shape, names, dtype=dtype, data=data)
