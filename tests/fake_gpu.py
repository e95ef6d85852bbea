"""A GPU that is simulated on the CPU, for tests of the sync finder: a queue on a clock of its own.

`FakeGpu` is what the timer asks; `Card`, a dispatch mode under the timer's, moves the clock: an op takes host time and
queues work, a read of a scalar or of a shape waits until the queue is empty. CPU tensors stand for those of the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from syncfree_ext.syncs.kinds import is_view

HOST = 10e-6  # of an op
READ = 15e-6  # of a wait, beyond the queue
PINNED = 50e9  # bytes a second

WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::equal", "aten::masked_select"}


class FakeGpu:
    """Time passes by the calls of `host`, `work` and `drain` alone."""

    type = "cpu"

    def __init__(self) -> None:
        self.time = 100.0
        self.done = 100.0
        self.calibrations = 0
        self.allocated = 0
        self.captures = False

    def now(self) -> float:
        return self.time

    def record(self) -> float:
        return max(self.time, self.done)

    def stream(self) -> int:
        return 0

    def mark(self) -> tuple[float, int]:
        return self.record(), self.stream()

    def prepare(self, events: int) -> None:
        pass

    def capturing(self) -> bool:
        return self.captures

    def calibrate(self) -> None:
        self.drain()
        self.calibrations += 1

    def resolve(self, events: Sequence[float]) -> list[float]:
        return list(events)

    def recording(self) -> float:
        return 0.0

    def pinned(self, engine: str, size: int) -> float:
        return size / PINNED

    def allocations(self) -> int:
        return self.allocated

    def backlog(self, seconds: float) -> None:
        self.work(seconds)

    def host(self, seconds: float) -> None:
        self.time += seconds

    def work(self, seconds: float) -> None:
        self.done = max(self.done, self.time) + seconds

    def drain(self) -> None:
        self.time = max(self.time, self.done)


class Card(TorchDispatchMode):
    """Gives each op its times. `work` maps the name of an op to seconds on the GPU; others get `default`."""

    def __init__(self, gpu: FakeGpu, work: Mapping[str, float] | None = None, default: float = 30e-6) -> None:
        super().__init__()
        self.gpu, self.work, self.default = gpu, work or {}, default

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        mask = name == "aten::index" and any(i is not None and i.dtype.itemsize == 1 for i in args[1])
        if name in WAITS or mask or (name == "aten::repeat_interleave" and not (kwargs or {}).get("output_size")):
            self.gpu.drain()
            self.gpu.host(READ)
        else:
            self.gpu.host(HOST)
            if not is_view(func):
                self.gpu.work(self.work.get(name, self.default))
        return func(*args, **(kwargs or {}))


class Behaves(Card):
    """A card on which `aten::neg` behaves as the test says."""

    def __init__(self, gpu: FakeGpu, neg: Any) -> None:
        super().__init__(gpu)
        self.neg = neg

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::neg":
            self.neg(self.gpu)
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class TwoStreams(FakeGpu):
    """Each with a queue of its own; `current` is the one that ops go to."""

    def __init__(self) -> None:
        super().__init__()
        self.current, self.queues = 0, [self.done, self.done]

    def stream(self) -> int:
        return self.current

    def record(self) -> float:
        return max(self.time, self.queues[self.current])

    def work(self, seconds: float) -> None:
        self.queues[self.current] = self.record() + seconds

    def drain(self) -> None:
        self.time = self.record()

    def calibrate(self) -> None:
        self.time = max(self.time, *self.queues)
        super().calibrate()


@contextmanager
def fake_card(work: Mapping[str, float] | None = None, default: float = 30e-6) -> Iterator[FakeGpu]:
    """A simulated GPU for find_syncs(gpu=...), with its card in place."""
    gpu = FakeGpu()
    with Card(gpu, work, default):
        yield gpu
