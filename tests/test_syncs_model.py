"""The model against a simulation that it does not know: what a row saves is what removing it saves."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from fake_gpu import HOST, READ, FakeGpu
from syncfree_ext.syncs.collect import Timed, build
from syncfree_ext.syncs.model import LAUNCH, NOISE, Queue, Step
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


@pytest.mark.parametrize("engine", [None, "to device"])
def test_work_begins_when_it_is_handed_over(engine: str | None) -> None:
    """Near the end of a slow call, and the wait behind it ends when it ended."""
    steps = [
        Step(0.0, 3e-4, 0.0, 1e-3, engine=engine, lag=2.9e-4),
        Step(3e-4, 1.31e-3, 1.29e-3, 0.0, row=0),
        Step(1.32e-3, 1.33e-3, 1.31e-3, 1e-5),
    ]
    assert steps[0].after == pytest.approx(1.29e-3)
    queue = Queue(steps, 1.33e-3)
    assert queue.replay(removed=()) == pytest.approx(1.33e-3, abs=1e-9)
    assert queue.replay(removed=(0,)) == pytest.approx(1.30e-3, abs=1e-9)


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
    # The first op comes at once, and takes no more than half of that.
    assert (report.own_ms, report.step_ms) == (pytest.approx(0.75), pytest.approx(4.0))
    assert report.replay_ms < report.step_ms
    assert Report.from_json(report.to_json()).own_ms == report.own_ms


@pytest.mark.parametrize("views", [0, 5])
def test_the_main_stream_is_that_of_most_waits_and_work(views: int) -> None:
    """And of all ops where there is neither."""
    steps = [Step(0.0, 1e-5, 0.0, 1e-3, stream=1)]
    steps += [Step(1e-5 * (k + 1), 1e-5 * (k + 2), 0.0, 0.0, stream=1) for k in range(views)]
    assert Queue(steps[1:], 1.0)._main == (1 if views else 0)
    steps += [Step(1e-2 + k * 1e-5, 1e-2 + (k + 1) * 1e-5, 0.0, 0.0, row=0) for k in range(2)]
    assert Queue(steps, 1.0)._main == 0
