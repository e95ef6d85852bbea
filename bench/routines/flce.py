"""Forward and backward, their two halves, and forward only, at the shapes of language models."""

from __future__ import annotations

import torch

from bench import heads
from bench.context import Context

from .common import measure

HELP = "Time, memory and error of every head: forward and backward, each alone, and forward only."


def run(ctx: Context) -> None:
    for dtype in ctx.with_dtypes(torch.bfloat16):
        for shape in ctx.with_shapes("llama8b", "gemma2b", "qwen06b", "llama2"):
            for data in ctx.with_data("unit"):
                measure(ctx, "flce", shape, ctx.heads or heads.parse("all"), dtype=dtype, data=data)
