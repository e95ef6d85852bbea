"""What ignored tokens cost: the same batch with 0, 25, 50, 75 and 90 percent of its targets ignored.

The limit stays that of the whole batch, so that a head which skips ignored rows falls below it.
"""

from __future__ import annotations

import torch

from bench import heads
from bench.context import Context

from .common import TRAIN, measure

HELP = "Time against the share of ignored targets."
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 0.9)


def run(ctx: Context) -> None:
    for dtype in ctx.with_dtypes(torch.bfloat16):
        for shape in ctx.with_shapes("llama8b"):
            for data in ctx.with_data("unit"):
                for ignored in FRACTIONS:
                    measure(
                        ctx,
                        "ragged",
                        shape,
                        ctx.heads or heads.parse("few"),
                        dtype=dtype,
                        data=data,
                        ignored=ignored,
                        parts=(TRAIN,),
                        real_limit=False,
                    )
