"""What differs between the CPU and a CUDA device: waiting, clocks, caches, peak memory."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

MIB = 2**20


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Hand back everything that nothing refers to, so that what was measured before does not shape what comes next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def cache_bytes(device: torch.device) -> int:
    """How much data must lie between two uses of a buffer for the second to find nothing of it in the cache."""
    if device.type == "cuda":
        return 4 * int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 * MIB))
    return 128 * MIB


class Marks:
    """Points in time along one call: events on CUDA, the host clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._points: list[tuple[str, Any]] = []

    def __call__(self, name: str) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._points.append((name, event))
        else:
            self._points.append((name, time.perf_counter()))

    def milliseconds(self) -> dict[str, float]:
        """From each mark to the next, by the name of the later one, and "total". Wait for the device first."""

        def between(a: Any, b: Any) -> float:
            return float(a.elapsed_time(b)) if self._cuda else 1e3 * (b - a)

        parts: dict[str, float] = {}
        for (_, a), (name, b) in zip(self._points, self._points[1:], strict=False):
            parts[name] = parts.get(name, 0.0) + between(a, b)
        parts["total"] = between(self._points[0][1], self._points[-1][1])
        return parts


def peak_memory(step: Callable[[], Any], device: torch.device) -> int:
    """Bytes that a call of `step` holds at most above what was allocated before it. Call `step` once before.

    On CUDA from the caching allocator's own count. On the CPU from the allocations that the profiler sees, which
    include those made inside C++ operators, but no scratch that a library takes from malloc on its own.
    """
    release_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        del kept
        return peak
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = step()
    del kept
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextlib.contextmanager
def counted_syncs(device: torch.device) -> Iterator[list[int]]:
    """Yield a list whose one entry is, after the block, how often torch saw the host wait for the device."""
    count = [0]
    if device.type != "cuda":
        yield count
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield count
    finally:
        torch.cuda.set_sync_debug_mode(before)
    count[0] = sum("synchroniz" in str(w.message) and "operation" in str(w.message) for w in seen)
