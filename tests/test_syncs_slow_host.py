"""Costs of waits when measuring takes the host longer than its ops do, against a simulation without measuring.

Of a step that the GPU bounds, the timer makes one that the host bounds: the GPU is idle when most ops begin, and their
events tell little. The simulated ops hand over their work shortly before they return, as real ones do, and an event is
recorded after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from fake_gpu import READ, FakeGpu
from syncfree_ext.syncs.collect import build, resolve_events
from syncfree_ext.syncs.kinds import Counts, Kind
from syncfree_ext.syncs.model import LAUNCH
from syncfree_ext.syncs.report import Report
from syncfree_ext.syncs.sites import Stack
from syncfree_ext.syncs.timer import SLOW, Call, Entry

STEPS = 6
PYTHON = 8e-6  # before each op
RECORDING = 3e-6  # from an op's return until its event is in place


class SlowHost:
    """Ops of some kinds, and reads, of which those of some rows take one launch instead. Keeps what a timer would.

    Args:
        host: seconds of the host an op.
        own: seconds of the host that the timer takes at each, nearly a third of it before.
        gone: rows whose reads go.
    """

    def __init__(self, host: float, own: float, gone: Sequence[int] = ()) -> None:
        self.op_time, self.own, self.gone = host, own, gone
        self.host = self.gpu = 0.0
        self.entries: list[Entry] = []

    def op(self, kind: int, work: float) -> None:
        entered = self.host = self.host + PYTHON
        start = entered + 0.3 * self.own
        duration = self.op_time * (0.8, 1.0, 1.3, 0.7, 2.0)[kind % 5]
        end = start + duration
        self.gpu = max(self.gpu, start + max(0.3 * duration, duration - 6e-6)) + work
        self.host = end + 0.7 * self.own
        after = max(self.gpu, end + RECORDING)
        self.entries.append(Entry(start, end, None, after, None, (kind, 4, True), entered=entered, left=self.host))

    def read(self, row: int) -> None:
        entered = self.host = self.host + PYTHON
        start = entered + 0.3 * self.own
        before = max(start, self.gpu)
        end = start + LAUNCH if row in self.gone else before + READ
        self.host = end + 0.7 * self.own
        call = Call(f"row{row}", Kind.SCALAR, "", Counts.ALWAYS, Stack(None, None, None, False, False))
        entry = Entry(start, end, before, max(before, end), call, engine="to host", entered=entered, left=self.host)
        self.entries.append(entry)

    @property
    def step_ms(self) -> float:
        return 1e3 * max(self.host, self.gpu) / STEPS


def small_then_large(run: SlowHost) -> None:
    """A drained GPU waits for the host all through the small ops."""
    run.read(0)
    for i in range(300):
        run.op(i % 5, 3e-6)
    run.read(1)
    for i in range(300):
        run.op(5 + i % 5, 100e-6)
    run.read(2)


def mixed(run: SlowHost) -> None:
    works = [6e-6, 20e-6, 50e-6, 120e-6, 300e-6, 800e-6]
    for i in range(700):
        run.op(i * 7 % 23 if i % 9 else 23 + i % 2, works[i * 7 % 23 % 4] if i % 9 else works[4 + i % 2])
        if i in (35, 350):
            run.read(i // 350)
    run.read(2)


def play(program: Callable[[SlowHost], None], host: float, own: float, gone: Sequence[int] = ()) -> SlowHost:
    run = SlowHost(host, own, gone)
    for _ in range(STEPS):
        program(run)
    return run


def reported(run: SlowHost) -> Report:
    first = run.entries[0].start
    ends = [first + i * (run.host - first) / STEPS for i in range(STEPS + 1)]
    return build(resolve_events(run.entries, FakeGpu()), ends, SLOW)


@pytest.mark.parametrize("program", [small_then_large, mixed], ids=lambda program: program.__name__)
@pytest.mark.parametrize("own", [20e-6, 60e-6, 120e-6])
@pytest.mark.parametrize("host", [10e-6, 25e-6])
def test_costs_are_those_without_measuring(program: Callable[[SlowHost], None], host: float, own: float) -> None:
    report = reported(play(program, host, own))
    base = play(program, host, 0.0).step_ms
    free = play(program, host, 0.0, (0, 1, 2)).step_ms
    near = {"abs": 0.02 * base}
    assert report.model_error == pytest.approx(0, abs=5e-3)
    assert report.replay_ms == pytest.approx(base, **near)
    assert report.free_ms == pytest.approx(free, **near)
    assert sorted(row.op for row in report.rows) == ["row0", "row1", "row2"]
    for row in report.rows:
        number = int(row.op.removeprefix("row"))
        saved = base - play(program, host, 0.0, (number,)).step_ms
        idle = play(program, host, 0.0, [other for other in range(3) if other != number]).step_ms - free
        assert row.saves_ms == pytest.approx(saved, **near), row.op
        assert row.idle_ms == pytest.approx(idle, **near), row.op


def test_measuring_makes_the_host_the_bound() -> None:
    """Else nothing is tested here: with the longest of its times a step takes half as long again, or more."""
    for program in (small_then_large, mixed):
        assert play(program, 25e-6, 120e-6).step_ms > 1.5 * play(program, 25e-6, 0.0).step_ms
