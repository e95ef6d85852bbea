#!/usr/bin/env python3
"""Times two parts of a training loop on a GPU against what they replace.

put: what `AsyncScalars.put` takes of the host, and how much later work that is queued behind it on the training stream
ends while a bulk copy to the host runs on another stream; beside it `.item()`, and a copy into pinned memory.

masked_indices: the time on the GPU of a random selection, against rand + argsort + gather, and with given keys, from a
seed, and of the first positions. The selections are compared.

    python examples/time_loop_parts.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import syncfree_ext as sf

COPY_BYTES = 2**31
REPEATS = 20


def host_microseconds(call: Callable[[], object], repeats: int = 200) -> float:
    """Median time of the host in a call, the queue of the GPU being short."""
    times: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


class Bulk:
    """A copy to the host that keeps a copy engine busy, on a stream of its own."""

    def __init__(self) -> None:
        self.source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        self.target = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        self.stream = torch.cuda.Stream()

    def queue(self) -> None:
        """Starts it."""
        with torch.cuda.stream(self.stream):
            self.target.copy_(self.source, non_blocking=True)

    def milliseconds(self) -> float:
        """Alone."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self.stream)
        self.queue()
        end.record(self.stream)
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))


def stream_milliseconds(call: Callable[[], object], bulk: Bulk | None) -> tuple[float, float]:
    """Medians: on the GPU from before the call to the end of a small kernel behind it, and of the host in the call."""
    small = torch.zeros(1024, device="cuda")
    on_gpu: list[float] = []
    on_host: list[float] = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        if bulk is not None:
            bulk.queue()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        before = time.perf_counter()
        call()
        on_host.append((time.perf_counter() - before) * 1e3)
        small.add_(1)
        end.record()
        torch.cuda.synchronize()
        on_gpu.append(start.elapsed_time(end))
    return statistics.median(on_gpu), statistics.median(on_host)


def time_put() -> dict[str, dict[str, float]]:
    """Of three scalars."""
    values = {name: torch.rand((), device="cuda") for name in ("loss", "grad_norm", "accuracy")}
    loss = values["loss"]
    ring = sf.AsyncScalars("cuda", list(values), depth=64)
    pinned = torch.empty((), pin_memory=True)
    step = iter(range(10**9))

    def put() -> None:
        ring.put(next(step), values)

    def put_and_poll() -> None:
        put()
        ring.poll()

    ways: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "AsyncScalars.put, 3 values": put,
        "the same and poll": put_and_poll,
        "copy into pinned memory, 1 value": lambda: pinned.copy_(loss, non_blocking=True),
        ".item(), 1 value": loss.item,
    }
    bulk = Bulk()
    for way in ways.values():
        stream_milliseconds(way, bulk)
    results = {"bulk copy alone": {"gpu_ms": bulk.milliseconds()}}
    for name, way in ways.items():
        gpu, host = stream_milliseconds(way, bulk)
        quiet, _ = stream_milliseconds(way, None)
        results[name] = {
            "host_us": host_microseconds(way),
            "host_behind_copy_us": host * 1e3,
            "stream_behind_copy_ms": gpu,
            "stream_alone_ms": quiet,
        }
    ring.close()
    return results


def gpu_microseconds(call: Callable[[], object]) -> float:
    """Of one call, from a CUDA graph of ten, so that the host does not show."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 10)
    return statistics.median(times)


def naive_selection(mask: Tensor, size: int, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest keys of the set positions, by a sort of the whole row, ascending."""
    length = mask.shape[1]
    order = keys.masked_fill(~mask, 2.0).argsort(dim=-1, stable=True)[:, :size]
    keep = mask.gather(1, order)
    order = order.masked_fill(~keep, length).sort(-1).values
    keep = order < length
    return order.masked_fill(~keep, 0), keep


def time_selection(rows: int, length: int, size: int) -> dict[str, float]:
    """Microseconds of the GPU for each way; raises if the selections differ."""
    mask = torch.rand(rows, length, device="cuda") < 0.5
    mask[0, 100:] = False
    keys = torch.rand(rows, length, device="cuda")
    indices, valid, _ = sf.masked_indices(mask, size, order="random", scores=keys)
    for ours, theirs in zip((indices, valid), naive_selection(mask, size, keys), strict=True):
        if not torch.equal(ours, theirs):
            raise SystemExit("masked_indices and argsort select different positions for the same keys")

    def naive() -> object:
        return naive_selection(mask, size, torch.rand(rows, length, device="cuda"))

    return {
        "rand + argsort + gather": gpu_microseconds(naive),
        "masked_indices, random": gpu_microseconds(lambda: sf.masked_indices(mask, size, order="random")),
        "masked_indices, given keys": gpu_microseconds(
            lambda: sf.masked_indices(mask, size, order="random", scores=keys)
        ),
        "masked_indices, seed": gpu_microseconds(lambda: sf.masked_indices(mask, size, order="random", seed=1)),
        "masked_indices, first": gpu_microseconds(lambda: sf.masked_indices(mask, size)),
    }


def main() -> None:
    """Measures, prints two tables, writes the numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=8, help="rows of the mask (default: 8)")
    parser.add_argument("--length", type=int, default=32768, help="columns of the mask (default: 32768)")
    parser.add_argument("--size", type=int, default=512, help="positions to select (default: 512)")
    parser.add_argument("--json", type=Path, help="file for the numbers (default: none)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("time_loop_parts.py: expected a CUDA device, found none")
    put = time_put()
    selection = time_selection(options.rows, options.length, options.size)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"a copy of {COPY_BYTES / 2**30:.0f} GiB to the host alone: {put['bulk copy alone']['gpu_ms']:.1f} ms\n")
    print(f"{'':34}  {'host us':>9}  {'behind copy: host us':>20}  {'stream ms':>10}  {'alone ms':>9}")
    for name, row in put.items():
        if "host_us" in row:
            print(
                f"{name:34}  {row['host_us']:>9.1f}  {row['host_behind_copy_us']:>20.1f}  "
                f"{row['stream_behind_copy_ms']:>10.3f}  {row['stream_alone_ms']:>9.3f}"
            )
    print(f"\n{options.rows} x {options.length}, {options.size} of each row{'':>12}  {'GPU us':>9}  {'times':>6}")
    first = selection["rand + argsort + gather"]
    for name, microseconds in selection.items():
        print(f"{name:34}  {microseconds:>9.1f}  {first / microseconds:>6.2f}")
    if options.json:
        numbers = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "put": put,
            "selection": {"rows": options.rows, "length": options.length, "size": options.size, "us": selection},
        }
        options.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
