"""Views give the GPU nothing to do: what the timer leaves out for them, and what it must still see."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fake_gpu import Behaves, Card, FakeGpu, TwoStreams
from syncfree_ext.syncs import explicit, find_syncs, step
from syncfree_ext.syncs.collect import resolve_events
from syncfree_ext.syncs.kinds import Hint, Kind, is_view
from syncfree_ext.syncs.sites import Frames
from syncfree_ext.syncs.timer import Timer


def line() -> int:
    """The line that calls this."""
    return sys._getframe(1).f_lineno


def test_a_view_gets_no_event() -> None:
    """It is on the host's clock, in the stream of the op before, and takes the GPU nothing."""

    class Beside(FakeGpu):
        def stream(self) -> int:
            return 3

    gpu = Beside()
    timer = Timer(gpu, Frames())
    x = torch.ones(2, 3)
    with Card(gpu, default=1e-3), timer:
        timer.start()
        x + 1
        x.t()
        x + 1
        x.view(3, 2)
        timer.stop()
    first, view, second, last = timer.entries
    assert [entry.after is None for entry in timer.entries] == [False, True, False, True]
    assert view.like == (torch.ops.aten.t.default, 0, False)
    assert (view.stream, last.stream) == (3, 3)
    assert view.end - view.start == pytest.approx(10e-6)
    timed = resolve_events(timer.entries, gpu)
    assert [t.upper for t in timed] == pytest.approx([1.01e-3, 0.0, 1e-3, 0.0], abs=1e-9)
    assert timed[1].after == pytest.approx(first.after)
    assert timed[3].after == pytest.approx(second.after)


def test_a_view_with_an_event() -> None:
    """There may have been work without an op: at first, after a while of something else, and after a replay."""

    class Wrapped(torch.Tensor):
        pass

    gpu = FakeGpu()
    timer = Timer(gpu, Frames())
    x = torch.ones(2, 3)
    made: list[bool] = []
    with Card(gpu), timer:
        timer.start()
        for before in (lambda: None, lambda: gpu.host(40e-6), lambda: gpu.host(60e-6), timer.unseen, lambda: None):
            before()
            x.t()
            made.append(timer.entries[-1].after is not None)
        for _ in range(5):  # together they take longer
            x.t()
        made.append(timer.entries[-1].after is not None)
        torch.nn.Parameter(x).t()
        made.append(timer.entries[-1].after is not None)
        with timer.explicit("wait", Hint(Kind.EXPLICIT)):
            gpu.host(1e-3)
        x.t()
        made.append(timer.entries[-1].after is not None)
        with timer.untimed():
            pass  # perhaps a backlog
        x.t()
        made.append(timer.entries[-1].after is not None)
        # Such tensors may do more than make a view.
        x.to_sparse().t()
        made.append(timer.entries[-1].after is not None)
        x.as_subclass(Wrapped).t()
        made.append(timer.entries[-1].after is not None)
        torch.ops.aten._unsafe_view.out(x, [6], out=torch.empty(6))
        made.append(timer.entries[-1].after is not None)
        timer.stop()
    assert made == [True, False, True, True, False, False, False, False, True, True, True, True]


@pytest.mark.parametrize(("launch", "slow_us"), [(8e-6, 50.0), (1e-3, 50.0), (1e-3, 1.0), (1e-3, 1500.0)])
@pytest.mark.parametrize("loading", [0.0, 2e-3, 4e-3])
def test_work_without_an_op_before_a_view(loading: float, launch: float, slow_us: float) -> None:
    """Of a graph, whose replay takes the host next to nothing, or of a compiled region: its result is detached, and the
    host does something else."""

    def loop(gpu: FakeGpu, waits: bool) -> Iterator[None]:
        x = torch.ones(2, 3)

        def launched() -> None:
            gpu.host(launch)
            gpu.work(10e-3)

        for _ in range(12):
            x + 1
            explicit._launching(launched)() if launch < 50e-6 else launched()
            x.detach()
            gpu.host(loading)
            for _ in range(20):
                x.add_(0)
            if waits:
                x.sum().item()
            gpu.host(3e-3)
            yield

    gpu = FakeGpu()
    with Card(gpu), find_syncs(warmup=3, steps=5, slow_us=slow_us, gpu=gpu) as report:
        for _ in loop(gpu, True):
            step()
    free = FakeGpu()
    with Card(free):
        ends = [max(free.time, free.done) for _ in loop(free, False)]
    saved = report.step_ms - (ends[-1] - ends[3]) / 8 * 1e3
    (row,) = report.rows
    assert row.saves_ms == pytest.approx(saved, abs=0.3)
    assert saved > 2.5


def test_a_replay_is_shown_in_its_own_stream() -> None:
    """By a view, although an op of another stream came between."""

    def loop(gpu: TwoStreams, waits: bool) -> Iterator[None]:
        x = torch.ones(2, 3)

        def launched() -> None:
            gpu.host(8e-6)
            gpu.work(5e-3)

        for _ in range(12):
            gpu.current = 1
            x + 1
            explicit._launching(launched)()
            gpu.current = 0
            x * 2
            gpu.current = 1
            x.detach()
            gpu.host(3e-3)
            for _ in range(20):
                x.add_(0)
            if waits:
                x.sum().item()
            gpu.host(0.5e-3)
            gpu.current = 0
            yield

    gpu = TwoStreams()
    with Card(gpu), find_syncs(warmup=3, steps=5, gpu=gpu) as report:
        for _ in loop(gpu, True):
            step()
    free = TwoStreams()
    with Card(free):
        ends = [max(free.time, *free.queues) for _ in loop(free, False)]
    (row,) = report.rows
    assert row.saves_ms == pytest.approx(report.step_ms - (ends[-1] - ends[3]) / 8 * 1e3, abs=0.1)


@pytest.mark.parametrize("views", [2, 6])
def test_views_do_not_tell_what_most_ops_take(views: int) -> None:
    """They are short. An op that takes the host longer is not one that hands over a lot all the time."""

    class Handing(Card):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if is_view(func) or func._schema.name == "aten::mul":
                gpu.host(2e-6 if is_view(func) else 40e-6)
                gpu.work(0.0 if is_view(func) else 100e-6)
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    gpu, x = FakeGpu(), torch.ones(2, 3)
    with Handing(gpu), find_syncs(warmup=3, steps=5, gpu=gpu) as report:
        for _ in range(12):
            for _ in range(10):
                x * 2
                for _ in range(views):
                    x.t()
                gpu.host(150e-6)
                x + 1
                x + 1
                gpu.host(150e-6)
            x.sum().item()
            step()
    assert report.busy_ms == pytest.approx(10 * 0.1 + 21 * 0.03, rel=0.05)


def test_what_waits_behind_work_without_an_op_and_a_view() -> None:
    """Such as a replay, whose result is cut to size for an op that waits in its own code."""

    def stops(gpu: FakeGpu) -> None:
        gpu.drain()
        gpu.host(15e-6)

    gpu, x = FakeGpu(), torch.ones(2, 3)
    with Behaves(gpu, stops), find_syncs(warmup=3, steps=5, gpu=gpu) as report:
        for _ in range(12):
            x + 1
            gpu.host(60e-6)
            gpu.work(5e-3)
            y = x[:, :2].t()
            y.neg()
            gpu.host(1e-3)
            step()
    assert [(row.op, row.calls) for row in report.rows] == [("aten::neg", 1.0)]
    assert report.slow == []


def test_views_that_the_machine_held_up_do_not_wait() -> None:
    """Twice until just when the GPU ran dry, of some hundred that met a busy one."""
    gpu, x = FakeGpu(), torch.ones(2, 3)
    late = 0.0

    class Stalls(Card):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal late
            if func._schema.name == "aten::t":
                gpu.host(late)
                late = 0.0
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Stalls(gpu, default=1e-3), find_syncs(warmup=3, steps=5, gpu=gpu) as report:
        for index in range(12):
            for _ in range(5):
                x + 1
            for _ in range(40):
                x.t()
            late = max(0.0, gpu.done - gpu.time) - 5e-6 if index in (4, 6) else 0.0
            x.t()
            gpu.host(6e-3)
            step()
    assert report.rows == []
    assert [op.op for op in report.slow] == ["aten::t"]


def test_views_choose_no_stream() -> None:
    """They are counted with the op before, which may have been the only one of its stream."""
    gpu, x = TwoStreams(), torch.ones(2, 3)
    with Card(gpu, default=300e-6), find_syncs(warmup=3, steps=5, gpu=gpu) as report:
        for _ in range(12):
            gpu.current = 1
            x * 2
            gpu.current = 0
            for _ in range(30):
                x.t()
            for _ in range(10):
                y = x + 1
            y.sum().item()
            step()
    (row,) = report.rows
    assert report.replay_ms == pytest.approx(report.step_ms, rel=0.02)
    assert row.saves_ms < 0.5


def test_a_slow_view_is_looked_at() -> None:
    class Stalls(Card):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.gpu.host(2e-3)
            return super().__torch_dispatch__(func, types, args, kwargs)

    gpu, x = FakeGpu(), torch.ones(2, 3)
    with Stalls(gpu), find_syncs(warmup=1, steps=2, gpu=gpu) as report:
        for _ in range(4):
            x.t()
            step()
            here = line() - 2
    ((op, calls, where),) = [(op.op, op.calls, op.where) for op in report.slow]
    assert (op, calls, where.rpartition(":")[2]) == ("aten::t", 1.0, str(here))
    assert report.rows == []


def test_forward_lines_of_views() -> None:
    """What waits in the backward of a view, such as an allocation, is found where the view was made."""

    class Stops(Card):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name == "aten::slice_backward":
                self.gpu.drain()
                self.gpu.host(10e-6)
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    gpu, x = FakeGpu(), torch.ones(2, 3, requires_grad=True)
    with Stops(gpu), find_syncs(warmup=1, steps=4, gpu=gpu) as report:
        for _ in range(6):
            y = x.exp().t()
            y = y[1:]
            sliced = line() - 1
            y = y.sin()
            for _ in range(30):
                torch.ones(3).exp()
            y.sum().backward()
            step()
    assert [(row.line, row.node) for row in report.rows] == [(sliced, "SliceBackward0")]


def test_who_listens_is_told_of_replays() -> None:
    told: list[int] = []
    replay = explicit._launching(lambda graph: told.append(graph) or "result")
    with (
        explicit.listening(lambda *_: nullcontext(), unseen=lambda: told.append(-1)),
        explicit.listening(lambda *_: nullcontext()),
    ):
        assert replay(7) == "result"
    replay(8)
    assert told == [7, -1, 8]


@pytest.mark.parametrize(("warmup", "made"), [(1, []), (2, []), (3, [60]), (4, [60])])
def test_events_are_made_beforehand(warmup: int, made: list[int]) -> None:
    """As many as the ops of a step need which are no views, and some more: for all measured steps.

    A step is whole where there was one before. What was made comes before a calibration, and is let go at the end.
    """

    class Asked(FakeGpu):
        def prepare(self, events: int) -> None:
            asked.append((events, self.calibrations))

    asked: list[tuple[int, int]] = []
    gpu, x = Asked(), torch.ones(2, 3)
    with Card(gpu), find_syncs(warmup=warmup, steps=4, gpu=gpu):
        for index in range(12):
            for _ in range(40 if index == 0 else 8):
                x.t() + 1
            x.sum().item()
            x.to_sparse().t()  # gets one, too
            step()
        assert asked[-1] == (0, 2)
        assert [events for events, _ in asked[:-1]] == made
        assert all(calibrations == 0 for _, calibrations in asked[:-1])
