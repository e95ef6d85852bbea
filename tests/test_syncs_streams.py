"""What waits cost where several streams work, against a simulation that the model does not know.

A copy between host and GPU takes its engine when it is ready, whoever was queued first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from fake_gpu import HOST, PINNED, READ, FakeGpu
from syncfree_ext.syncs import Report
from syncfree_ext.syncs.collect import build, resolve_events
from syncfree_ext.syncs.kinds import Counts, Kind
from syncfree_ext.syncs.model import LAUNCH, Queue, Step
from syncfree_ext.syncs.sites import Stack
from syncfree_ext.syncs.timer import SLOW, Call, Entry

STEPS = 6
PYTHON = 5e-6  # before each op
TINY = 1e-6  # the copy of a number
PAGEABLE = 6e9  # bytes a second of a copy from ordinary memory


class Streams:
    """Streams, events and copy engines; waits of some rows take one launch instead. Keeps what a timer would."""

    def __init__(self, gone: Sequence[int] = ()) -> None:
        self.gone = gone
        self.host = 0.0
        self.done: dict[int, float] = {}
        self.busy: dict[str, list[tuple[float, float]]] = {}
        self.events: dict[int, float] = {}
        self.entries: list[Entry] = []

    def _free(self, engine: str, ready: float, duration: float) -> float:
        """The first time from `ready` on at which the engine has a gap that long."""
        for start, end in sorted(self.busy.get(engine, [])):
            if ready + duration <= start:
                break
            ready = max(ready, end)
        return ready

    def op(self, work: float, stream: int = 0, engine: str | None = None) -> None:
        self.host += PYTHON
        start = self.host
        self.host += HOST
        ready = max(self.done.get(stream, 0.0), start)
        if engine is not None:
            ready = self._free(engine, ready, work)
            self.busy.setdefault(engine, []).append((ready, ready + work))
        self.done[stream] = ready + work
        like = (engine, int(work * 1e9), True)
        self.entries.append(Entry(start, self.host, None, self.done[stream], None, like, stream=stream, engine=engine))

    def _wait(self, row: int, until: float, stream: int, **more: object) -> None:
        start = self.host
        before = max(start, self.done.get(stream, 0.0))
        self.host = start + LAUNCH if row in self.gone else max(start, until) + READ
        kind = Kind.SCALAR if "engine" in more else Kind.EXPLICIT
        call = Call(f"row{row}", kind, "", Counts.ALWAYS, Stack(None, None, None, False, False))
        self.entries.append(Entry(start, self.host, before, max(before, self.host), call, stream=stream, **more))  # type: ignore[arg-type]

    def read(self, row: int, stream: int = 0) -> None:
        ready = max(self.host, self.done.get(stream, 0.0))
        self._wait(row, self._free("to host", ready, TINY), stream, engine="to host")

    def count(self, row: int, work: float, stream: int = 0) -> None:
        """A kernel whose result has a size that the host reads, as in nonzero; without the wait the kernel alone."""
        start = self.host
        before = max(start, self.done.get(stream, 0.0))
        self.done[stream] = before + work
        if row in self.gone:
            self.host = start + LAUNCH
        else:
            self.host = self._free("to host", self.done[stream], TINY) + READ
        call = Call(f"row{row}", Kind.SHAPE, "", Counts.ALWAYS, Stack(None, None, None, False, False))
        after = max(self.done[stream], self.host)
        self.entries.append(Entry(start, self.host, before, after, call, stream=stream, engine="to host"))

    def load(self, row: int, size: int, stream: int = 0) -> None:
        """A copy from ordinary memory, which the host helps with; from pinned memory if the wait is gone."""
        start = self.host
        before = max(start, self.done.get(stream, 0.0))
        seconds = size / (PINNED if row in self.gone else PAGEABLE)
        begin = self._free("to device", before, seconds)
        self.busy.setdefault("to device", []).append((begin, begin + seconds))
        self.done[stream] = begin + seconds
        self.host = start + LAUNCH if row in self.gone else self.done[stream]
        call = Call(
            f"row{row}", Kind.COPY, "pageable memory to device", Counts.ALWAYS, Stack(None, None, None, False, False)
        )
        done = self.done[stream]
        self.entries.append(Entry(start, self.host, before, done, call, stream=stream, engine="to device", copied=size))

    def synchronize(self, row: int, kind: str, what: int = 0) -> None:
        until = self.events.get(what, 0.0) if kind == "event" else self.done.get(what, 0.0)
        until = max(self.done.values()) if kind == "all" else until
        self._wait(row, until, 0, target=(kind, EVENTS[what] if kind == "event" else what))

    def link(self, event: int, stream: int, waits: bool) -> None:
        there = self.done.get(stream, 0.0)
        if waits:
            self.done[stream] = max(there, self.events.get(event, 0.0))
        else:
            self.events[event] = max(there, self.host)
        self.entries.append(Entry(self.host, self.host, None, None, None, stream=stream, link=(EVENTS[event], waits)))

    def follow(self, stream: int, other: int) -> None:
        """stream.wait_stream(other)"""
        self.link(9, other, False)
        self.link(9, stream, True)

    @property
    def length(self) -> float:
        return max(self.host, self.done.get(0, 0.0)) - self.entries[0].start


EVENTS = [object() for _ in range(10)]
Program = Callable[[Streams], None]


def offloading(run: Streams) -> None:
    """Copies to the host beside the work, and reads three numbers behind that."""
    for i in range(1000):
        run.op(30e-6)
        if i == 500:
            run.read(3)
    run.follow(0, 1)  # the copy of the last step must be over
    run.op(200e-6)
    run.follow(1, 0)
    run.op(24e-3, stream=1, engine="to host")
    for row in range(3):
        run.read(row)


def synchronizing(run: Streams) -> None:
    """A read, then waits for another stream and for an event: each takes over from the one before."""
    for _ in range(300):
        run.op(30e-6)
    run.follow(1, 0)
    run.op(10e-3, stream=1, engine="to host")
    run.link(4, 1, False)
    run.read(0)
    run.synchronize(1, "stream", 1)
    run.synchronize(2, "event", 4)


def synchronizing_all(run: Streams) -> None:
    for _ in range(300):
        run.op(10e-6)
    run.follow(1, 0)
    run.op(5e-3, stream=1)
    run.synchronize(0, "event", 5)  # of nobody
    run.synchronize(1, "all")
    for _ in range(100):
        run.op(10e-6)


def beside_work(run: Streams) -> None:
    """A wait for a short stream while the long one goes on."""
    for _ in range(300):
        run.op(30e-6)
    run.follow(1, 0)
    run.op(10e-3, stream=1)
    for _ in range(100):
        run.op(30e-6)
    run.synchronize(0, "stream", 1)
    for _ in range(100):
        run.op(30e-6)


def overtaken(run: Streams) -> None:
    """A copy that waits for work lets a later one on another stream pass."""
    for _ in range(300):
        run.op(60e-6)
    run.follow(1, 0)
    run.op(8e-3, stream=1, engine="to host")
    run.op(20e-6, stream=2)
    run.op(1e-3, stream=2, engine="to host")
    run.follow(0, 2)
    run.op(50e-6)
    run.read(0)
    run.read(1)


def overtaking_read(run: Streams) -> None:
    """A number of an idle stream is read while a large copy still waits for work."""
    for _ in range(100):
        run.op(60e-6)
    run.follow(1, 0)
    run.op(8e-3, stream=1, engine="to host")
    run.read(2, stream=3)
    for _ in range(20):
        run.op(60e-6)
    run.read(0)
    run.read(1)


def prefetching(run: Streams) -> None:
    for _ in range(300):
        run.op(30e-6)
    run.follow(1, 0)
    run.op(6e-3, stream=1, engine="to device")
    run.link(2, 1, False)
    run.op(100e-6, stream=2, engine="to device")
    run.follow(0, 2)
    for _ in range(50):
        run.op(30e-6)
    run.link(2, 0, True)
    run.read(0)


def two_at_work(run: Streams) -> None:
    for _ in range(200):
        run.op(30e-6)
    run.read(0)
    for _ in range(200):
        run.op(30e-6, stream=1)
    run.follow(0, 1)
    run.read(1)


def loading(run: Streams) -> None:
    """A large batch from ordinary memory, and a number that is read."""
    run.load(0, 40_000_000)
    for _ in range(300):
        run.op(30e-6)
    run.read(1)


def loading_ahead(run: Streams) -> None:
    """Nothing but the copy waits: the GPU does what the host has queued before, and then stands still."""
    for _ in range(200):
        run.op(60e-6)
    run.load(0, 20_000_000)
    for _ in range(50):
        run.op(20e-6)


def loading_behind_a_prefetch(run: Streams) -> None:
    """One copy to the device goes on when the other is called for."""
    run.op(3e-3, stream=1, engine="to device")
    run.load(0, 20_000_000)
    for _ in range(300):
        run.op(30e-6)
    run.follow(0, 1)
    run.read(1)


def loading_before_a_prefetch(run: Streams) -> None:
    run.load(0, 20_000_000)
    run.op(4e-3, stream=1, engine="to device")
    for _ in range(100):
        run.op(30e-6)
    run.follow(0, 1)
    run.op(1e-3)
    run.read(1)


def counting_beside_a_copy(run: Streams) -> None:
    """What takes the place of a nonzero copies nothing, and waits for no engine."""
    run.follow(1, 0)
    run.op(8e-3, stream=1, engine="to host")
    run.count(0, 0.1e-3)
    for _ in range(600):
        run.op(30e-6)


PROGRAMS = [
    counting_beside_a_copy,
    loading, loading_ahead, loading_behind_a_prefetch, loading_before_a_prefetch, offloading, synchronizing,
    synchronizing_all, beside_work, overtaken, overtaking_read, prefetching, two_at_work,
]  # fmt: skip


def play(program: Program, gone: Sequence[int] = ()) -> Streams:
    run = Streams(gone)
    for _ in range(STEPS):
        program(run)
    return run


def reported(run: Streams) -> Report:
    ends = [run.entries[0].start + i * (run.host - run.entries[0].start) / STEPS for i in range(STEPS + 1)]
    gpu = FakeGpu()
    return build(resolve_events(run.entries, gpu), ends, SLOW, pinned=gpu.pinned)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_costs_are_those_of_the_simulation(program: Program) -> None:
    measured = play(program)
    report = reported(measured)
    names = sorted(row.op for row in report.rows)
    rows = [int(name.removeprefix("row")) for name in names]
    assert len(rows) > 0
    assert report.model_error == pytest.approx(0, abs=2e-3)
    # Replays keep the order of copies. With the host ahead this read overtakes no more, and its idle is too small.
    near = {"abs": (0.1 if program is overtaking_read else 0.01) * measured.length / STEPS * 1e3}
    free = play(program, rows).length
    assert report.free_ms == pytest.approx(free / STEPS * 1e3, **near)
    for row in report.rows:
        number = int(row.op.removeprefix("row"))
        saved = measured.length - play(program, [number]).length
        idle = play(program, [other for other in rows if other != number]).length - free
        assert row.saves_ms == pytest.approx(saved / STEPS * 1e3, **near), row.op
        assert row.idle_ms == pytest.approx(idle / STEPS * 1e3, **near), row.op


def test_the_programs_are_worth_their_name() -> None:
    """Something is at stake in each: a wait that costs alone, and less or nothing beside another one."""
    for program in PROGRAMS:
        report = reported(play(program))
        assert max(row.idle_ms for row in report.rows) > 0.01 * report.step_ms or program is prefetching


@pytest.mark.parametrize("streams", [2, 3])
def test_a_replay_with_all_waits_ends_when_the_steps_ended(streams: int, rng: torch.Generator) -> None:
    """Random ops, copies, events and reads."""

    def random_step(run: Streams) -> None:
        for _ in range(150):
            stream = draw.choice([0] * 6 + list(range(1, streams)))
            what, work = draw.random(), draw.expovariate(1 / 20e-6)
            if what < 0.06:
                run.read(draw.randrange(3), stream)
            elif what < 0.16:
                run.link(draw.randrange(8), stream, draw.random() < 0.5)
            elif stream and what < 0.4:
                run.op(20 * work, stream, draw.choice(["to host", "to device"]))
            else:
                run.op(work, stream)

    for _ in range(20):
        draw = random.Random(int(torch.randint(2**31, (), generator=rng)))
        assert reported(play(random_step)).model_error == pytest.approx(0, abs=0.03)


def test_engines_that_do_not_make_reads_wait() -> None:
    """A read that was over while a copy that had begun went on shows a second engine."""
    copy = Step(0.0, 1e-5, 0.0, 5e-2, stream=1, engine="to host")
    op = Step(1e-5, 2e-5, 0.0, 1e-3)
    passed = Step(2e-5, 1.1e-3, 1.02e-3, 0.0, row=0, engine="to host")
    late = Step(1.2e-3, 5.1e-2, 1.1e-3, 0.0, row=1, engine="to host")
    apart = Queue([copy, op, passed], 1.1e-3)
    assert apart.replay(removed=()) == pytest.approx(1.1e-3)
    behind = Queue([copy, op, late], 5.1e-2)
    assert behind.replay(removed=()) == pytest.approx(5.1e-2)
    # With evidence of both kinds the engine is not shared: what the late one took is its own.
    both = Queue([copy, op, passed, late], 5.1e-2)
    assert both.replay(removed=()) == pytest.approx(5.1e-2)
    assert both.replay(removed=(1,)) == pytest.approx(1.2e-3 + LAUNCH, rel=1e-3)


def test_a_wait_in_the_middle_of_a_copy_leaves_the_engine_to_it() -> None:
    """The host reads a number while a large copy is under way, twice: the second finds the engine free."""
    run = Streams()
    run.op(20e-3, stream=1, engine="to host")
    run.op(1e-3)
    run.read(0)
    run.read(1)
    steps = []
    for t in resolve_events(run.entries, FakeGpu()):
        row = None if t.call is None else int(t.call.op.removeprefix("row"))
        work = t.upper if row is None else 0.0
        steps.append(Step(t.start, t.end, t.before, work, row, stream=t.stream, engine=t.engine))
    queue = Queue(steps, run.host)
    assert queue.replay(removed=()) == pytest.approx(run.length, rel=1e-3)
    assert queue.replay(removed=(0,)) == pytest.approx(run.length, rel=2e-3)
    assert queue.replay(removed=(0, 1)) < 2e-3
