"""Host and GPU time of a head while a large device-to-host copy drains on another stream.

A head that reads a number back waits behind that copy, and the host with it. Measured with an upstream gradient of 1,
which lets a head leave its gradients alone, and of 0.5. `host_autograd_ms` is the backward of one multiplication of one
number under the same conditions: what waking the engine's thread costs whatever the head does. With "one thread" both
run in the thread that calls backward (`torch.autograd.set_multithreading_enabled(False)`), which wakes nobody. On the
CPU there is no copy and no stream: the times are those of the calls.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from bench import heads
from bench.context import Context, identity, sizes
from bench.data import Batch, make
from bench.device import counted_syncs, release_memory, synchronize
from bench.reference import Reference, reference
from bench.results import Record
from bench.timing import spread

from .common import guarded, refuse_if_wrong

HELP = "Host and GPU time while a device-to-host copy drains on a side stream."
COPY_BYTES = 2 * 2**30
# The upstream gradient, and whether autograd may use a thread of its own for the device.
VARIANTS = {"upstream 1": (1.0, True), "upstream 0.5": (0.5, True), "upstream 1, one thread": (1.0, False)}
_REPEATS = 20
_WARM_UP = 4


class _Backlog:
    """Queues the copy on its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
            self._target = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
            self._stream = torch.cuda.Stream(device)

    def queue(self) -> None:
        if self._cuda:
            with torch.cuda.stream(self._stream):
                self._target.copy_(self._source, non_blocking=True)

    def milliseconds(self) -> float:
        """How long one copy takes by itself."""
        if not self._cuda:
            return 0.0
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.queue()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)


class _Event:
    """A point on the current stream, or on the host clock where there is none."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._time = 0.0

    def record(self) -> None:
        if self._event is not None:
            self._event.record()
        self._time = time.perf_counter()

    def until(self, other: _Event) -> float:
        if self._event is not None:
            return float(self._event.elapsed_time(other._event))
        return 1e3 * (other._time - self._time)


def _one_call(head: heads.Head, batch: Batch, upstream: Tensor, backlog: _Backlog) -> Record:
    device = batch.x.device
    events = [_Event(device) for _ in range(4)]
    for event in events:
        event.record()  # makes it
    batch.drop_grad()
    synchronize(device)
    backlog.queue()
    events[0].record()
    t0 = time.perf_counter()
    loss = head.call(batch.x, batch.w, batch.t)
    t1 = time.perf_counter()
    events[1].record()
    # A head that waited has drained the copy by now; backward shall meet one as well.
    backlog.queue()
    events[2].record()
    t2 = time.perf_counter()
    loss.backward(upstream)
    t3 = time.perf_counter()
    events[3].record()
    synchronize(device)
    number = torch.ones((), device=device, requires_grad=True)
    product = number * 2
    backlog.queue()
    t4 = time.perf_counter()
    product.backward(upstream)
    t5 = time.perf_counter()
    synchronize(device)
    return {
        "host_autograd_ms": 1e3 * (t5 - t4),
        "host_forward_ms": 1e3 * (t1 - t0),
        "host_backward_ms": 1e3 * (t3 - t2),
        "gpu_forward_ms": events[0].until(events[1]),
        "gpu_backward_ms": events[2].until(events[3]),
    }


def _syncs(head: heads.Head, batch: Batch) -> Record:
    batch.drop_grad()
    synchronize(batch.x.device)
    with counted_syncs(batch.x.device) as forward:
        loss = head.call(batch.x, batch.w, batch.t)
    with counted_syncs(batch.x.device) as backward:
        loss.backward()
    batch.drop_grad()
    return {"syncs_forward": forward[0], "syncs_backward": backward[0]}


def run(ctx: Context) -> None:
    for dtype in ctx.with_dtypes(torch.bfloat16):
        for shape in ctx.with_shapes("llama8b"):
            for data in ctx.with_data("unit"):
                names = ctx.heads or heads.parse("few")
                variants = {name: identity("backlog", shape, dtype, data, 0.0, name) for name in VARIANTS}
                todo = [n for n in names if any(ctx.todo([n], **who) for who in variants.values())]
                if not todo or ctx.is_over():
                    continue
                ctx.echo(f"backlog {shape.name}: {', '.join(todo)}")
                batch = make(shape, data, dtype, ctx.device).require_grad()
                ref = reference(batch)
                backlog = _Backlog(ctx.device)
                copy_ms = statistics.median(backlog.milliseconds() for _ in range(3))
                for name in todo:
                    if ctx.is_over():
                        break
                    for variant, who in variants.items():
                        value, threads = VARIANTS[variant]
                        upstream = torch.full((), value, device=ctx.device)
                        work = functools.partial(_measure, batch=batch, ref=ref, upstream=upstream, backlog=backlog)
                        with torch.autograd.set_multithreading_enabled(threads):
                            record = guarded(ctx, name, {**who, **sizes(shape), "copy_ms": copy_ms}, work)
                        if record["status"] == "ok":
                            ctx.echo(f"  {name}, {variant}: {describe(record)}")
                    batch.drop_grad()
                    release_memory(ctx.device)


def _measure(head: heads.Head, batch: Batch, ref: Reference, upstream: Tensor, backlog: _Backlog) -> Record:
    refused = refuse_if_wrong(head, batch, ref)
    if refused:
        return refused
    calls = [_one_call(head, batch, upstream, backlog) for _ in range(_WARM_UP + _REPEATS)][_WARM_UP:]
    return {**{name: spread([call[name] for call in calls]) for name in calls[0]}, **_syncs(head, batch)}


def describe(record: Record) -> str:
    """The medians in a line."""
    ms = {k: record[k]["median"] for k in record if k.startswith(("host_", "gpu_"))}
    return (
        f"host {ms['host_forward_ms']:.2f} + {ms['host_backward_ms']:.2f} ms (autograd alone "
        f"{ms['host_autograd_ms']:.2f}), GPU {ms['gpu_forward_ms']:.2f} + "
        f"{ms['gpu_backward_ms']:.3f} ms, {record['syncs_forward']} + {record['syncs_backward']} syncs seen"
    )
