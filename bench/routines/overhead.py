"""Microseconds of a forward and backward at a small shape: eager, compiled, and replayed from a graph."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import heads
from bench.context import Context, identity, sizes
from bench.data import Batch, make
from bench.device import counted_syncs, release_memory, synchronize
from bench.reference import Reference, reference
from bench.results import Record
from bench.timing import describe, stat

from .common import guarded, refuse_if_wrong, train_step

HELP = "Microseconds a call at a small shape: eager, compiled, CUDA graph."
_ROUNDS = 5


def _microseconds(call: Callable[[], Any], device: torch.device, block_ms: float) -> Record:
    """Host time of a call in a row of calls, the device waited for at the end of the row only."""
    for _ in range(3):
        call()
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    calls = max(3, min(500, int(block_ms / 1e3 / max(time.perf_counter() - start, 1e-6))))
    rounds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        rounds.append([1e6 * (time.perf_counter() - start) / calls])
    return stat(rounds).to_json()


def _captured(head: heads.Head, batch: Batch) -> Callable[[], Any]:
    """A replay of forward and backward.

    Raises:
        RuntimeError: the host waits for the device in one of them, which cannot be captured. Not tried, because a
            capture that fails leaves the allocator in a bad state.
    """
    with counted_syncs(batch.x.device) as syncs:
        train_step(head.call, batch)
    if syncs[0]:
        raise RuntimeError(f"cannot be captured: the host waits for the device {syncs[0]} times")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train_step(head.call, batch)
    torch.cuda.current_stream().wait_stream(side)
    batch.drop_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train_step(head.call, batch)
    return graph.replay


def _ways(head: heads.Head, batch: Batch, device: torch.device) -> dict[str, Callable[[], Callable[[], Any]]]:
    def eager() -> Callable[[], Any]:
        return lambda: train_step(head.call, batch)

    def compiled() -> Callable[[], Any]:
        torch._dynamo.reset()
        call: Any = torch.compile(head.call, fullgraph=True, dynamic=False)
        return lambda: train_step(call, batch)

    ways: dict[str, Callable[[], Callable[[], Any]]] = {"eager": eager}
    if head.name != "torch-compile":
        ways["compiled"] = compiled
    if device.type == "cuda":
        ways["graph"] = lambda: _captured(head, batch)
    return ways


def _measure(head: heads.Head, batch: Batch, ref: Reference, block_ms: float) -> Record:
    device = batch.x.device
    refused = refuse_if_wrong(head, batch, ref)
    if refused:
        return refused
    fields: Record = {}
    for way, prepare in _ways(head, batch, device).items():
        try:
            fields[f"{way}_us"] = _microseconds(prepare(), device, block_ms)
        except Exception as error:
            fields[f"{way}_failure"] = describe(error)
            release_memory(device)
        batch.drop_grad()
    return fields


def run(ctx: Context) -> None:
    for dtype in ctx.with_dtypes(torch.bfloat16):
        for shape in ctx.with_shapes("256x256x1024"):
            who = identity("overhead", shape, dtype, "unit", 0.0)
            todo = ctx.todo(ctx.heads or heads.parse("few"), **who)
            if not todo or ctx.is_over():
                continue
            ctx.echo(f"overhead {shape.name}: {', '.join(todo)}")
            batch = make(shape, "unit", dtype, ctx.device).require_grad()
            ref = reference(batch)
            for name in todo:
                if ctx.is_over():
                    break
                work = functools.partial(_measure, batch=batch, ref=ref, block_ms=min(ctx.block_ms, 100.0))
                record = guarded(ctx, name, {**who, **sizes(shape)}, work)
                us = [f"{k[:-3]} {record[k]['median']:.0f} us" for k in record if k.endswith("_us")]
                cannot = [f"{k[:-8]} fails" for k in record if k.endswith("_failure")]
                ctx.echo(f"  {name}: {', '.join(us + cannot) or record['status']}")
