"""The model against a simulation that it does not know: what a row saves is what removing it saves."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from fake_gpu import HOST, READ, FakeGpu
from syncfree_ext.syncs.collect import Timed, build
from syncfree_ext.syncs.model import LAUNCH, NOISE, Link, Queue, Step
from syncfree_ext.syncs.report import Report
from syncfree_ext.syncs.timer import SLOW

Op = tuple[float, float, float, "int | None"]  # Python before it, host time, GPU time, row


def simulate(program: Sequence[Op], gone: Sequence[int] = ()) -> tuple[list[Step], float]:
    """Runs ops and waits on the simulated GPU; waits of some rows cost one launch instead."""
    gpu = FakeGpu()
    steps = []
    for python, host, work, row in program:
        gpu.host(python)
        start = gpu.time
        before = gpu.record()
        if row is None:
            gpu.work(work)
            gpu.host(host)
        elif row in gone:
            gpu.host(LAUNCH)
        else:
            gpu.drain()
            gpu.host(READ)
        steps.append(Step(start, gpu.time, before, work if row is None else 0.0, row))
    return steps, gpu.time


def length(program: Sequence[Op], gone: Sequence[int] = ()) -> float:
    steps, end = simulate(program, gone)
    return max([end, *(step.after for step in steps)]) - steps[0].start


def random_program(draw: random.Random, ops: int, rows: int, bound: float) -> list[Op]:
    """Ops that are mostly bound by the GPU (`bound` > 1) or the host, with waits of some rows at random places."""
    program: list[Op] = []
    for _ in range(ops):
        row = draw.randrange(rows) if draw.random() < 0.1 else None
        program.append(
            (draw.random() * 20e-6, HOST * (0.5 + draw.random()), draw.expovariate(1 / (10e-6 * bound)), row)
        )
    return program


@pytest.fixture
def draw(rng: torch.Generator) -> random.Random:
    return random.Random(int(torch.randint(2**31, (), generator=rng)))


@pytest.mark.parametrize("bound", [0.1, 1.0, 5.0])
def test_savings_are_those_of_removing_the_row(draw: random.Random, bound: float) -> None:
    for _ in range(20):
        rows = 4
        program = random_program(draw, 400, rows, bound)
        steps, end = simulate(program)
        queue = Queue(steps, end)
        assert queue.replay(removed=()) == pytest.approx(length(program), abs=1e-9)
        for gone in [*((row,) for row in range(rows)), (0, 2), tuple(range(rows))]:
            assert queue.replay(removed=gone) == pytest.approx(length(program, gone), abs=1e-9)
        assert queue.replay(removed=None) == queue.replay(removed=range(rows))
        kept = queue.replay(only=(1,))
        assert kept == pytest.approx(length(program, (0, 2, 3)), abs=1e-9)


def test_two_waits_in_a_row_cost_together_what_one_costs() -> None:
    """Removing one saves nothing while the other drains the GPU; either alone causes the idle."""
    burst: list[Op] = [(0.0, HOST, 100e-6, None)] * 20
    program = (burst + [(0.0, HOST, 0.0, 0), (0.0, HOST, 0.0, 1)] + [(0.0, HOST, 1e-6, None)] * 50) * 10
    steps, end = simulate(program)
    queue = Queue(steps, end)
    everything, free = queue.replay(removed=()), queue.replay(removed=None)
    for row in (0, 1):
        assert everything - queue.replay(removed=(row,)) < 10 * (READ + HOST)
        assert queue.replay(only=(row,)) - free > 0.8 * (everything - free)


def test_a_wait_that_leaves_the_gpu_busy_costs_nothing() -> None:
    """Between the wait and the next long op the host issues a few ops only, and the GPU never runs dry for long."""
    program: list[Op] = ([(0.0, 1e-6, 10e-3, None), (0.0, HOST, 0.0, 0)]) * 20
    steps, end = simulate(program)
    queue = Queue(steps, end)
    assert queue.replay(removed=()) - queue.replay(removed=(0,)) < 0.01 * queue.replay(removed=())


def test_an_allocation_blocks_the_host_and_drains_nothing() -> None:
    """Neither does a wait for an event that lies behind: the GPU goes on while the host stands."""
    steps = [
        Step(0.0, 1e-5, 0.0, 5e-3),
        Step(1e-5, 2e-3, 5e-3, 0.0, row=0, drains=False),
        Step(2e-3, 2.01e-3, 5e-3, 1e-3),
    ]
    busy = Queue(steps, 2.01e-3)
    assert busy.replay(removed=()) == pytest.approx(6e-3)
    assert busy.replay(removed=None) == pytest.approx(6e-3)  # the GPU was busy all along
    host_bound = Queue([*steps, Step(2.01e-3, 8e-3, 6e-3, 1e-6)], 8e-3)
    assert host_bound.replay(removed=()) == pytest.approx(8e-3)
    assert host_bound.replay(removed=None) == pytest.approx(8e-3 - 1.99e-3 + LAUNCH)


def test_work_that_was_there_before() -> None:
    steps = [Step(0.0, 1e-5, 3e-3, 1e-3), Step(1e-5, 4.01e-3, 4e-3, 0.0, row=0)]
    assert Queue(steps, 4.01e-3).replay(removed=()) == pytest.approx(4.01e-3)


def test_work_that_no_op_launched_counts() -> None:
    """A graph replay shows only in the event before the wait."""
    steps = [
        Step(0.0, 1e-5, 0.0, 1e-5),
        Step(2e-5, 5.03e-3, 5e-3, 0.0, row=0),
        Step(5.04e-3, 5.05e-3, 5.03e-3, 2e-5),
    ]
    queue = Queue(steps, 5.05e-3)
    assert queue.replay(removed=()) == pytest.approx(5.06e-3, abs=NOISE)
    assert queue.replay(removed=None) == pytest.approx(5.03e-3, abs=2 * NOISE)


def test_nothing_at_all() -> None:
    queue = Queue([], 0.0)
    assert queue.replay() == queue.replay(removed=None) == 0.0


@pytest.mark.parametrize("bound", [0.1, 1.0, 5.0])
def test_what_measuring_takes_is_left_out(draw: random.Random, bound: float) -> None:
    """A host that measuring slows down is less often ahead of the GPU; costs are those of the host without it."""
    own = 30e-6
    for _ in range(20):
        program = random_program(draw, 400, 3, bound)
        # Once before the first op, which no gap shows: from there on the clock runs.
        slowed = [program[0], *((python + own, host, work, row) for python, host, work, row in program[1:])]
        steps, end = simulate(slowed)
        queue = Queue(steps, end, own)
        assert Queue(steps, end).replay(removed=()) == pytest.approx(length(slowed), abs=1e-9)
        for gone in ((), (0,), (1, 2), (0, 1, 2)):
            assert queue.replay(removed=gone) == pytest.approx(length(program, gone), abs=own + 1e-9)


def test_the_report_says_what_measuring_took() -> None:
    starts = [i * 1e-3 for i in range(8)]
    entries = [Timed(start, start + 1e-4, start, start + 1e-4, None) for start in starts]
    report = build(entries, [0.0, 4e-3, 8e-3], SLOW, own=2e-4)
    assert (report.own_ms, report.step_ms) == (pytest.approx(0.8), pytest.approx(4.0))
    assert report.replay_ms < report.step_ms
    assert Report.from_json(report.to_json()).own_ms == report.own_ms


# Several streams


class Streams:
    """Streams, events and copy engines, in which a program runs; what was measured is kept as steps."""

    def __init__(self, gone: Sequence[int] = ()) -> None:
        self.gone = gone
        self.host = 0.0
        self.done: dict[int, float] = {}
        self.engines: dict[str, float] = {}
        self.events: dict[int, float] = {}
        self.steps: list[Step | Link] = []

    def op(self, work: float, stream: int = 0, engine: str | None = None) -> None:
        self.host += 5e-6  # Python
        before = max(self.done.get(stream, 0.0), self.engines.get(engine or "", 0.0))
        self.steps.append(Step(self.host, self.host + HOST, before, work, stream=stream, engine=engine))
        self.done[stream] = max(before, self.host) + work
        if engine is not None:
            self.engines[engine] = self.done[stream]
        self.host += HOST

    def read(self, row: int, stream: int = 0) -> None:
        """Waits for the stream, and comes after all copies to the host that were queued before."""
        start, before = self.host, self.done.get(stream, 0.0)
        if row in self.gone:
            self.host += LAUNCH
        else:
            self.host = max(start, before, self.engines.get("to host", 0.0)) + READ
        self.steps.append(Step(start, self.host, before, 0.0, row, stream=stream, engine="to host"))

    def link(self, event: int, stream: int, waits: bool) -> None:
        there = self.done.get(stream, 0.0)
        if waits:
            self.done[stream] = max(there, self.events.get(event, 0.0))
        else:
            self.events[event] = max(there, self.host)
        self.steps.append(Link(self.host, stream, event, waits))

    @property
    def length(self) -> float:
        first = next(step.start for step in self.steps if isinstance(step, Step))
        return max(self.host, self.done.get(0, 0.0)) - first


def offloading(gone: Sequence[int] = (), steps: int = 6) -> Streams:
    """A loop that copies to the host on a second stream and, behind that, reads three numbers: the copy takes 24 ms,
    the step's work 30 ms, and the host needs 15 ms to issue it."""
    run = Streams(gone)
    for _ in range(steps):
        for i in range(1000):
            run.op(30e-6)
            if i == 500:
                run.read(3)  # when the copy of the last step is over
        run.link(1, 1, False)
        run.link(1, 0, True)  # the copy of the last step must be over
        run.op(200e-6)
        run.link(2, 0, False)
        run.link(2, 1, True)
        run.op(24e-3, stream=1, engine="to host")
        for row in range(3):
            run.read(row)
    return run


@pytest.mark.parametrize("gone", [(), (0,), (1,), (0, 1), (0, 1, 2), (3,), (0, 1, 2, 3)], ids=str)
def test_reads_behind_copies_of_another_stream(gone: tuple[int, ...]) -> None:
    """The first of them takes what the copy takes; without it the next one does."""
    measured = offloading()
    queue = Queue(measured.steps, measured.host)
    assert queue.replay(removed=()) == pytest.approx(measured.length, rel=1e-9)
    assert queue.replay(removed=gone) == pytest.approx(offloading(gone).length, rel=1e-9)
    others = [row for row in range(4) if row not in gone]
    assert queue.replay(only=gone) == pytest.approx(offloading(others).length, rel=1e-9)


def test_a_copy_beside_the_work_is_no_work_of_it() -> None:
    run = Streams()
    for _ in range(5):
        run.link(1, 0, False)
        run.link(1, 1, True)
        run.op(10e-3, stream=1, engine="to device")
        for _ in range(100):
            run.op(50e-6)
        run.read(0)
    queue = Queue(run.steps, run.host)
    assert queue.replay(removed=()) == pytest.approx(run.length, rel=1e-9)
    assert run.length < 5 * 8e-3  # not 5 x 15
    # A program that ends with copies under way is over when its main stream is.
    assert queue.measured == pytest.approx(run.length, rel=1e-9)


@pytest.mark.parametrize("streams", [2, 3])
def test_savings_with_several_streams(draw: random.Random, streams: int) -> None:
    """Random ops, copies, events and reads on several streams."""

    def play(seed: int, gone: Sequence[int] = ()) -> Streams:
        random_step, run = random.Random(seed), Streams(gone)
        for _ in range(600):
            stream = random_step.choice([0] * 6 + list(range(1, streams)))
            what, work = random_step.random(), random_step.expovariate(1 / 20e-6)
            if what < 0.06:
                run.read(random_step.randrange(3), stream)
            elif what < 0.16:
                run.link(random_step.randrange(8), stream, random_step.random() < 0.5)
            elif stream and what < 0.4:
                run.op(20 * work, stream, random_step.choice(["to host", "to device"]))
            else:
                run.op(work, stream)
        return run

    for _ in range(30):
        seed = draw.randrange(2**31)
        measured = play(seed)
        queue = Queue(measured.steps, measured.host)
        for gone in ((), (0,), (1, 2), (0, 1, 2)):
            assert queue.replay(removed=gone) == pytest.approx(play(seed, gone).length, abs=1e-9)


def test_an_engine_that_reads_do_not_wait_for() -> None:
    """A GPU with several engines: a read that was over long before the copy shows that it has its own."""
    steps = [
        Step(0.0, 1e-5, 0.0, 5e-2, stream=1, engine="to host"),
        Step(1e-5, 2e-5, 0.0, 1e-3),
        Step(2e-5, 1.1e-3, 1.02e-3, 0.0, row=0, engine="to host"),
        Step(1.1e-3, 1.2e-3, 1.1e-3, 1e-3),
        Step(1.2e-3, 2.2e-3, 2.1e-3, 0.0, row=1, engine="to host"),
    ]
    queue = Queue(steps, 2.2e-3)
    assert queue.replay(removed=()) == pytest.approx(2.2e-3)
    assert queue.replay(removed=(0,)) < 2.3e-3
