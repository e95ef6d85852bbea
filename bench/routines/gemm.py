"""What the matrix products of the library reach by chunk size: logits, dX, and dW written, added up, in the dtype and
in float32.

Also products whose rows are bounded by a number on the device (torch._grouped_mm), in full and at half the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.context import Context, identity, sizes
from bench.device import Marks, release_memory
from bench.shapes import Shape
from bench.timing import block, describe, stat

HELP = "TFLOP/s of the library's matrix products by chunk size."
_ROWS = (512, 1024, 2048, 4096, 8192)

Work = Callable[[], Any]


def _steps(shape: Shape, rows: int, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Work, float]]:
    """What -> the call and the share of the full operations it does."""
    g = torch.Generator(device).manual_seed(5)
    x = torch.randn(rows, shape.H, device=device, dtype=dtype, generator=g)
    w = torch.randn(shape.V, shape.H, device=device, dtype=dtype, generator=g) / shape.H**0.5
    grad = torch.randn(rows, shape.V, device=device, dtype=dtype, generator=g)
    z, dx, dw = torch.empty_like(grad), torch.empty_like(x), torch.zeros_like(w)
    steps: dict[str, tuple[Work, float]] = {
        "logits": (lambda: torch.mm(x, w.t(), out=z), 1.0),
        "dX": (lambda: torch.mm(grad, w, out=dx), 1.0),
        "dW written": (lambda: torch.mm(grad.t(), x, out=dw), 1.0),
        "dW added": (lambda: torch.addmm(dw, grad.t(), x, out=dw), 1.0),
    }
    if device.type == "cuda" and dtype != torch.float32:
        wide, logits = torch.zeros(shape.V, shape.H, device=device), torch.empty(rows, shape.V, device=device)
        steps |= {
            "logits in float32": (lambda: torch.mm(x, w.t(), out_dtype=torch.float32, out=logits), 1.0),
            "dW written in float32": (lambda: torch.mm(grad.t(), x, out_dtype=torch.float32, out=wide), 1.0),
            "dW added in float32": (lambda: torch.addmm(wide, grad.t(), x, out_dtype=torch.float32, out=wide), 1.0),
        }
    # torch._grouped_mm takes rows of whole 16 bytes.
    if device.type == "cuda" and dtype != torch.float32 and shape.V % 8 == 0 and shape.H % 8 == 0:
        all_rows, half = (torch.tensor([n], device=device, dtype=torch.int32) for n in (rows, rows // 2))
        three = w.t().unsqueeze(0)
        steps |= {
            "grouped logits": (lambda: torch._grouped_mm(x, three, offs=all_rows), 1.0),
            "grouped logits, half the rows": (lambda: torch._grouped_mm(x, three, offs=half), 0.5),
            "grouped dW": (lambda: torch._grouped_mm(grad.t(), x, offs=all_rows), 1.0),
            "grouped dW, half the rows": (lambda: torch._grouped_mm(grad.t(), x, offs=half), 0.5),
        }
    return steps


def run(ctx: Context) -> None:
    for dtype in ctx.with_dtypes(torch.bfloat16):
        for shape in ctx.with_shapes("llama8b"):
            for rows in _ROWS:
                if rows > shape.BT or ctx.is_over():
                    continue
                who = identity("gemm", shape, dtype, "random", 0.0)
                prefix = f"{rows} rows, "
                if ctx.store.has(head="library", **{**who, "variant": prefix + "dW added"}):
                    continue
                ctx.echo(f"gemm {shape.name}, {rows} rows")
                for what, (work, share) in _steps(shape, rows, dtype, ctx.device).items():
                    full = {**who, **sizes(shape), "head": "library", "variant": prefix + what, "rows": rows}

                    def step(call: int, mark: Marks, work: Work = work) -> None:
                        mark("start")
                        work()
                        mark("product")

                    try:
                        time = stat([block(step, ctx.device, ctx.block_ms)["total"]])
                    except Exception as error:
                        ctx.add("failed", describe(error), **full)
                        continue
                    tflops = share * 2 * rows * shape.H * shape.V / time.median / 1e9
                    ctx.add("ok", **full, ms=time.to_json(), tflops=tflops)
                    ctx.echo(f"  {what}: {time.median:.3f} ms, {tflops:.0f} TFLOP/s")
                release_memory(ctx.device)
