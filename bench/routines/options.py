"""What the options of the loss cost this library: forward and backward with each, beside none and beside the limit.

Peers have other options or none, so it runs alone. A call with an option is first held to float64 on some of the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench import limits
from bench.context import Context, identity, sizes
from bench.data import Batch, make, rotation
from bench.device import MIB, Marks, cache_bytes, peak_memory, release_memory
from bench.results import Record
from bench.shapes import Shape
from bench.timing import Participant, describe, interleave

from .common import gradients, wrong

HELP = "Time of this library with each option of the loss, against none."
_CHECKED_ROWS = 512
NONE = "none"

Draw = Callable[..., Tensor]
_OPTIONS: dict[str, Callable[[Shape, Draw], dict[str, Any]]] = {
    NONE: lambda shape, draw: {},
    "bias": lambda shape, draw: {"linear_bias": draw(shape.V).requires_grad_()},
    "class weights": lambda shape, draw: {"weight": draw(shape.V).abs() + 0.5},
    "token weights": lambda shape, draw: {"token_weight": draw(shape.BT).abs()},
    "token scaling": lambda shape, draw: {"token_scaling": True},
    "softcap": lambda shape, draw: {"softcap": 30.0},
    "smoothing": lambda shape, draw: {"label_smoothing": 0.1},
    "smoothing, class weights": lambda shape, draw: {"label_smoothing": 0.1, "weight": draw(shape.V).abs() + 0.5},
    "softcap, smoothing": lambda shape, draw: {"softcap": 30.0, "label_smoothing": 0.1},
    "z loss": lambda shape, draw: {"z_loss_weight": 1e-4},
    "accuracy": lambda shape, draw: {"return_token_accuracy": True},
}


def _drawn(shape: Shape, name: str, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(11)

    def draw(size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator)

    return _OPTIONS[name](shape, draw)


def _loss(batch: Batch, options: dict[str, Any]) -> Tensor:
    from syncfree_ext import linear_cross_entropy

    out = linear_cross_entropy(batch.x, batch.w, batch.t, **options)
    return out if isinstance(out, Tensor) else out.loss


def _errors(batch: Batch, options: dict[str, Any]) -> Record:
    """Relative L2 errors of loss, dX and dW against float64, on the first rows alone."""
    from syncfree_ext import reference

    rows = min(_CHECKED_ROWS, batch.shape.BT)
    part = replace(batch, shape=batch.shape.with_rows(rows), x=batch.x.detach()[:rows], w=batch.w.detach())
    part = replace(part, t=batch.t[:rows]).require_grad()
    options = {k: v[:rows] if k == "token_weight" else v for k, v in options.items()}
    loss = _loss(part, options)
    loss.backward()
    bias = options.get("linear_bias")
    # What is returned besides changes no gradient.
    plain = {k: v for k, v in options.items() if k != "linear_bias" and not k.startswith("return_")}
    expected = reference.linear_cross_entropy_gradients(
        part.x.detach(), part.w.detach(), part.t, linear_bias=None if bias is None else bias.detach(), **plain
    )
    assert expected.dw is not None
    dx, dw = gradients(part)

    def error(got: Tensor, right: Tensor) -> float:
        return float((got.detach().double() - right).norm() / right.norm())

    return {
        "loss": error(loss, expected.output.loss),
        "dx": error(dx, expected.dx),
        "dw": error(dw, expected.dw),
    }


def run(ctx: Context) -> None:
    for dtype in ctx.with_dtypes(torch.bfloat16):
        for shape in ctx.with_shapes("llama8b", "gemma2b"):
            for data in ctx.with_data("unit"):
                _measure(ctx, shape, dtype, data)


def _measure(ctx: Context, shape: Shape, dtype: torch.dtype, data: str) -> None:
    keys = {name: identity("options", shape, dtype, data, 0.0, name) for name in _OPTIONS}
    # What none takes is measured with the others, each time.
    todo = [name for name, who in keys.items() if ctx.todo(["syncfree"], **who)]
    if not todo or ctx.is_over():
        return
    ctx.echo(f"options {shape.name} {keys[NONE]['dtype']} {data}: {', '.join(todo)}")
    batch = make(shape, data, dtype, ctx.device).require_grad()
    fields: dict[str, Record] = {}
    timed: dict[str, Participant] = {}
    leaves = replace(batch, x=batch.x.detach(), w=batch.w.detach())
    batches = [b.require_grad() for b in rotation(leaves, cache_bytes(ctx.device))]
    for name in dict.fromkeys([NONE, *todo]):
        who = {**keys[name], **sizes(shape), "head": "syncfree"}
        options = _drawn(shape, name, ctx.device)
        try:
            error = _errors(batch, options)
            batch.drop_grad()
            fields[name] = {"error": error, "peak_mib": _peak(batch, options, ctx.device) / MIB}
        except Exception as problem:
            ctx.add("failed", describe(problem), **who)
            ctx.echo(f"  {name}: failed, {describe(problem)}")
            release_memory(ctx.device)
            continue
        if reason := wrong(error):
            ctx.add("wrong", reason, **who, error=error)
            ctx.echo(f"  {name}: wrong, {reason}")
            continue
        timed[name] = Participant(name, _step(batches, options))
    limit = limits.three_products(batch, real=False)
    deadline = max(ctx.deadline, time.monotonic() + 20)
    interleave([limit, *timed.values()], ctx.device, rounds=ctx.rounds, block_ms=ctx.block_ms, deadline=deadline)
    none = timed[NONE].stats()["total"].median if NONE in timed and timed[NONE].parts else None
    for name, participant in timed.items():
        who = {**keys[name], **sizes(shape), "head": "syncfree"}
        if participant.failure:
            ctx.add("failed", participant.failure, **who, **fields[name])
            continue
        total = participant.stats()["total"]
        figures: Record = {**fields[name], "train_ms": total.to_json()}
        if limit.parts:
            figures["x_limit"] = total.median / limit.stats()["total"].median
        if none is not None:
            figures["x_none"] = total.median / none
        ctx.add("ok", **who, **figures)
        ctx.echo(f"  {name}: {total.median:.4g} ms, {figures.get('x_none', float('nan')):.3f} × none")
    release_memory(ctx.device)


def _step(batches: list[Batch], options: dict[str, Any]) -> Callable[[int, Marks], None]:
    def step(call: int, mark: Marks) -> None:
        batch = batches[call % len(batches)]
        _drop(batch, options)
        mark("start")
        _loss(batch, options).backward()
        mark("train")
        _drop(batch, options)

    return step


def _peak(batch: Batch, options: dict[str, Any], device: torch.device) -> int:
    def once() -> None:
        _drop(batch, options)
        _loss(batch, options).backward()

    once()
    _drop(batch, options)
    peak = peak_memory(once, device)
    _drop(batch, options)
    return peak


def _drop(batch: Batch, options: dict[str, Any]) -> None:
    batch.drop_grad()
    if (bias := options.get("linear_bias")) is not None:
        bias.grad = None
