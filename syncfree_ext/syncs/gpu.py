"""What the timer needs of a GPU: events whose completion is known on the host's clock.

An event is recorded into the current stream and completes when all work before it has. Where it completed is read
later, when the measured steps are over, so that recording is all that happens in a step. Two calibrations, one before
and one after the last steps, tie the GPU's clock to the host's: each records some events and polls until they have
completed, and takes the one whose completion was seen within the shortest time, a few microseconds, even where the
event had to wait for another user of the GPU. The line between the two takes out the drift, of which there is little:
what is more than that is the calibrations' own error.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from . import internals


class Gpu(Protocol):
    """A device as the timer sees it. Times are in seconds on one clock."""

    type: str

    def now(self) -> float:
        """The host's clock."""

    def record(self) -> Any:
        """An event in the current stream."""

    def stream(self) -> int:
        """Which stream is the current one."""

    def mark(self) -> tuple[Any, int]:
        """Both: an event in the current stream, and which one that is."""

    def prepare(self, events: int) -> None:
        """Makes so many events beforehand, which takes longer than recording one; others are let go.

        Before a calibration, since it is work for the GPU.
        """

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph, where events must not be recorded."""

    def calibrate(self) -> None:
        """Waits for the GPU and ties its clock to the host's."""

    def resolve(self, events: Sequence[Any]) -> list[float]:
        """When each event completed. All must have."""

    def recording(self) -> float:
        """Seconds from when an event is asked for until an idle GPU has it in place."""

    def pinned(self, engine: str, size: int) -> float | None:
        """Seconds for a copy "to host" or "to device" of so many bytes of pinned memory; None if that is not known.

        Measures when it is called first, and waits for the GPU.
        """

    def allocations(self) -> int:
        """A number that grows whenever the allocator goes to the driver."""

    def backlog(self, seconds: float) -> None:
        """Queues work that keeps the GPU busy for about that long."""


# Two clocks of one machine drift apart by less than 200 millionths. A calibration that the machine held up in the wrong
# moment would look like a drift of percents over a short span.
_MAX_DRIFT = 2e-4
# An event that takes longer to be in place has waited for the turn of its process, and not for an idle GPU.
_MAX_RECORDING = 50e-6

# Of a copy that tells how fast copies are: 0.2 ms, of which the launch is a small part.
_COPIED = 1 << 23

# More events than this are made when they are needed.
_MOST_PREPARED = 1 << 16


class Anchor(NamedTuple):
    """A moment on both clocks: an event, and the middle of so many seconds of the host's within which it completed."""

    within: float
    host: float
    event: torch.cuda.Event


class CudaGpu:
    """The current CUDA device of this process."""

    type = "cuda"

    def __init__(self) -> None:
        self.now = time.perf_counter
        self.capturing = torch.cuda.is_current_stream_capturing
        self._anchors: list[Anchor] = []
        self._recordings: list[float] = []
        self._streams: dict[Any, tuple[torch.cuda.Stream, int]] = {}
        self._device: int | None = None  # of the events that are ready
        self._ready: list[torch.cuda.Event] = []
        self._load: tuple[torch.Tensor, torch.Tensor, float] | None = None
        self._rates: dict[str, float | None] = {}

    def record(self) -> torch.cuda.Event:
        """An event with a time stamp, in the current stream."""
        return self.mark()[0]

    def stream(self) -> int:
        """The number of the current stream."""
        return self._current(torch.cuda.current_device())[1]

    def mark(self) -> tuple[torch.cuda.Event, int]:
        """An event with a time stamp, and the number of the current stream, into which it goes."""
        device = torch.cuda.current_device()
        stream, number = self._current(device)
        ready = self._ready
        event = ready.pop() if ready and device == self._device else torch.cuda.Event(enable_timing=True)
        internals.record(event, stream)
        return event, number

    def prepare(self, events: int) -> None:
        """Makes so many events of the current device. The driver makes its own when one is recorded first."""
        self._ready = []
        if not events:
            return  # also on a GPU that has failed
        self._device = torch.cuda.current_device()
        stream = torch.cuda.current_stream()
        ready = [torch.cuda.Event(enable_timing=True) for _ in range(min(events, _MOST_PREPARED))]
        for event in ready:
            internals.record(event, stream)
        self._ready = ready

    def _current(self, device: int) -> tuple[torch.cuda.Stream, int]:
        """The current stream of a device, of which torch would make a new object at each op, and its number."""
        key = internals.stream_key(device)
        found = self._streams.get(key)
        if found is None:
            stream = torch.cuda.current_stream(device)
            found = self._streams[key] = stream, int(stream.stream_id)
        return found

    def calibrate(self) -> None:
        """Waits for the GPU and ties its clock to the host's."""
        torch.cuda.synchronize()
        rounds = []
        for _ in range(16):
            start = earliest = self.now()
            event = self.record()
            asked = self.now()
            while not event.query():
                earliest, asked = asked, self.now()
            end = self.now()
            rounds.append(Anchor(end - earliest, (earliest + end) / 2, event))
            self._recordings.append(rounds[-1].host - start)
        self._anchors.append(min(rounds, key=lambda anchor: anchor.within))

    def resolve(self, events: Sequence[torch.cuda.Event]) -> list[float]:
        """When each event completed, between the first and the last calibration."""
        first, last = self._anchors[0], self._anchors[-1]

        def since_first(event: torch.cuda.Event) -> float:
            return float(first.event.elapsed_time(event)) * 1e-3

        span = since_first(last.event)
        rate = min(max((last.host - first.host) / span, 1 - _MAX_DRIFT), 1 + _MAX_DRIFT) if span > 0 else 1.0
        # If the line has to be steeper or flatter than between the two, it goes through the better one.
        through = min(first, last, key=lambda anchor: anchor.within)
        origin = through.host - since_first(through.event) * rate
        return [origin + since_first(event) * rate for event in events]

    def recording(self) -> float:
        """Seconds from when an event is asked for until an idle GPU has it in place."""
        return min(statistics.median(self._recordings), _MAX_RECORDING) if self._recordings else 0.0

    def pinned(self, engine: str, size: int) -> float | None:
        """Seconds for a copy "to host" or "to device" of so many bytes of pinned memory; None if that is not known."""
        if engine not in self._rates:
            self._rates[engine] = self._rate(engine)
        rate = self._rates[engine]
        return None if rate is None else size / rate

    def _rate(self, engine: str) -> float | None:
        """Bytes a second; the best of a few copies."""
        try:
            host = torch.empty(_COPIED, dtype=torch.uint8, device="cpu", pin_memory=True)
            device = torch.empty(_COPIED, dtype=torch.uint8, device="cuda")
        except RuntimeError:  # one of them has no memory left
            return None
        source, target = (host, device) if engine == "to device" else (device, host)
        times = []
        for _ in range(4):
            start = self.record()
            target.copy_(source, non_blocking=True)
            times.append((start, self.record()))
        torch.cuda.synchronize()
        return _COPIED / max(1e-3 * min(float(start.elapsed_time(end)) for start, end in times), 1e-9)

    def allocations(self) -> int:
        """Calls of cudaMalloc and cudaFree, and retries after a failed one."""
        stats = torch.cuda.memory_stats_as_nested_dict()  # memory_stats takes longer than many an op
        return sum(stats.get(name, 0) for name in ("num_device_alloc", "num_device_free", "num_alloc_retries"))

    def backlog(self, seconds: float) -> None:
        """Queues matrix products; the first call measures how long one takes."""
        if self._load is None:
            a = torch.zeros(2048, 2048, device="cuda")
            out = torch.empty_like(a)
            torch.mm(a, a, out=out)
            start, end = self.record(), None
            for _ in range(10):
                torch.mm(a, a, out=out)
            end = self.record()
            torch.cuda.synchronize()
            self._load = a, out, max(start.elapsed_time(end) * 1e-4, 1e-6)
        a, out, each = self._load
        for _ in range(math.ceil(seconds / each)):
            torch.mm(a, a, out=out)


def current_gpu() -> Gpu | None:
    """The CUDA device, None where there is none."""
    return CudaGpu() if torch.cuda.is_available() else None
