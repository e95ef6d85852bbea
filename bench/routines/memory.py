"""Peak memory above the inputs, without timing: so that many chunk sizes can be weighed quickly."""

from __future__ import annotations

import torch

from bench import heads
from bench.context import Context

from .common import measure

HELP = "Peak memory above the inputs, for several chunk sizes."
_ROWS = (1024, 2048, 4096)


def run(ctx: Context) -> None:
    ours = [f"{name}@{rows}" for name in heads.GROUPS["ours"] for rows in _ROWS]
    for dtype in ctx.with_dtypes(torch.bfloat16):
        for shape in ctx.with_shapes("llama8b", "gemma2b", "qwen06b", "llama2"):
            for data in ctx.with_data("unit"):
                names = ctx.heads or [*heads.parse("ours"), *ours]
                measure(ctx, "memory", shape, names, dtype=dtype, data=data, timed=False)
