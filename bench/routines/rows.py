"""The kernels around the matrix products against the bandwidth of a copy: row cross-entropy, count, scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench import limits
from bench.context import Context, identity, sizes
from bench.data import IGNORE
from bench.device import Marks, release_memory
from bench.results import Record
from bench.shapes import Shape
from bench.timing import block, describe, stat

HELP = "GB/s of the row kernels, the count and the scale, against a copy."
_ROWS = 4096

Work = Callable[[], Any]


def _steps(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[tuple[str, str], tuple[Work, int]]:
    """(head, what) -> the call and the bytes it must move."""
    g = torch.Generator(device).manual_seed(5)
    rows = min(shape.BT, _ROWS)
    logits = torch.randn(rows, shape.V, device=device, dtype=dtype, generator=g)
    target = torch.randint(0, shape.V, (rows,), device=device, generator=g)
    target[::4] = IGNORE
    many = torch.randint(0, shape.V, (shape.BT,), device=device, generator=g)
    gradient = torch.randn(shape.V, shape.H, device=device, dtype=dtype, generator=g)
    one, half = (torch.full((), v, device=device) for v in (1.0, 0.5))
    leaf = logits.clone().requires_grad_()
    size = logits.numel() * logits.element_size()
    ours: Any = torch.ops.syncfree

    def torch_both() -> None:
        leaf.grad = None
        F.cross_entropy(leaf, target).backward()

    steps: dict[tuple[str, str], tuple[Work, int]] = {
        ("torch", "cross_entropy forward"): (lambda: F.cross_entropy(logits, target), size),
        ("torch", "cross_entropy forward and backward"): (torch_both, 3 * size),
    }
    if not hasattr(ours, "cross_entropy_forward"):
        return steps
    statistics = ours.cross_entropy_forward(logits, target)[5]
    steps |= {
        ("syncfree", "cross_entropy forward"): (lambda: ours.cross_entropy_forward(logits, target), size),
        ("syncfree", "cross_entropy backward"): (
            lambda: ours.cross_entropy_backward(one, logits, target, statistics),
            2 * size,
        ),
        ("syncfree", "count_targets"): (lambda: ours.count_targets(many, shape.V), many.numel() * 12),
        ("syncfree", "scale by 0.5"): (
            lambda: ours.scale_unless_one_([gradient], half),
            2 * gradient.numel() * gradient.element_size(),
        ),
        # Nothing is moved: the figure is the time it takes to see that.
        ("syncfree", "scale by 1"): (lambda: ours.scale_unless_one_([gradient], one), 0),
    }
    return steps


def run(ctx: Context) -> None:
    try:
        import syncfree_ext  # noqa: F401  (registers the ops)
    except ImportError as error:
        ctx.echo(f"rows: the ops of syncfree_ext are skipped, {error}")
    for dtype in ctx.with_dtypes(torch.bfloat16):
        for shape in ctx.with_shapes("llama8b", "qwen06b"):
            who = identity("rows", shape, dtype, "random", 0.0)
            if ctx.is_over() or ctx.store.has(head="copy", **who):
                continue
            ctx.echo(f"rows {shape.name}")
            bandwidth = limits.copy_bandwidth(ctx.device, ctx.block_ms)
            for (head, what), (work, moved) in _steps(shape, dtype, ctx.device).items():
                _measure(ctx, {**who, **sizes(shape), "head": head, "variant": what}, work, moved, bandwidth)
            ctx.add("ok", head="copy", **who, **sizes(shape), gbs=bandwidth)
            release_memory(ctx.device)


def _measure(ctx: Context, who: Record, work: Work, moved: int, bandwidth: float) -> None:
    def step(call: int, mark: Marks) -> None:
        mark("start")
        work()
        mark("work")

    try:
        time = stat([block(step, ctx.device, ctx.block_ms / 3)["total"] for _ in range(3)])
    except Exception as error:
        ctx.add("failed", describe(error), **who)
        ctx.echo(f"  {who['head']} {who['variant']}: failed, {describe(error)}")
        return
    rate = moved / time.median / 1e6
    ctx.add("ok", **who, ms=time.to_json(), bytes=moved, gbs=rate, share_of_copy=rate / bandwidth)
    ctx.echo(f"  {who['head']} {who['variant']}: {1e3 * time.median:.1f} us, {rate:.0f} GB/s of {bandwidth:.0f}")
