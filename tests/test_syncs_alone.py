"""Steps without the timer after the measured ones: what they tell, and when they tell nothing. On a simulated card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fake_gpu import READ, Card, FakeGpu
from syncfree_ext.syncs import Report, find_syncs, internals, step
from syncfree_ext.syncs.timer import Timer

WARMUP, STEPS = 1, 4
DISPATCH = 40e-6


class Dispatching(FakeGpu):
    """Handing an op to a timer that runs takes the host 40 us, of which no entry knows."""

    asked = False

    def now(self) -> float:
        self.asked = True
        return super().now()

    def calibrate(self) -> None:
        assert not self.captures, "nobody may wait while the stream is captured"
        super().calibrate()


class Handing(Card):
    """An op of 10 us hands over its work some time before it returns."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.gpu.asked:
            self.gpu.host(DISPATCH)
        self.gpu.asked = False
        name = func._schema.name
        if name not in self.work:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.gpu.host(2e-6)
        self.gpu.work(self.work[name])
        self.gpu.host(8e-6)
        return func(*args)


def gpu_bound() -> None:
    x = torch.ones(3)
    for _ in range(100):
        x.exp()
    x.sum().item()


def host_bound() -> None:
    x = torch.ones(3)
    for _ in range(300):
        x.sin()
    x.sum().item()


def measure(
    count: int,
    body: Callable[[], None] = gpu_bound,
    at: Callable[[FakeGpu, int], None] = lambda gpu, index: None,
    **options: Any,
) -> Report:
    """A loop of so many steps of a body, with something more at the end of some."""
    gpu = Dispatching()
    card = Handing(gpu, {"aten::exp": 30e-6, "aten::sin": 3e-6, "aten::cos": 300e-6})
    with card, find_syncs(**{"warmup": WARMUP, "steps": STEPS, "gpu": gpu, **options}) as report:
        for index in range(count):
            body()
            at(gpu, index)
            step()
            gpu.captures = False
    return report


# In ms: the GPU works on `ones`, which the host hands over when it returns, 100 ops and the sum, and the host reads.
PLAIN = 1e3 * (10e-6 + 30e-6 + 100 * 30e-6 + 30e-6 + READ)
# The host calls `ones`, 300 ops and the sum, waits for that, and reads.
HOST = 1e3 * (10e-6 + 300 * 10e-6 + 10e-6 + 30e-6 + READ)
# The end of the step before looks like an entry to the first op, which then takes so much longer.
ALONE = DISPATCH * 1e3


@pytest.mark.parametrize("after", [0, 1, 2, 3, 7])
def test_two_steps_tell_what_the_timer_takes(after: int) -> None:
    """The first step without it does not count. Without others a step seems as long as with the timer."""
    modes: list[bool] = []
    filled: list[Report] = []

    def look(gpu: FakeGpu, index: int) -> None:
        modes.append(isinstance(internals.top_mode(), Timer))

    report = measure(WARMUP + STEPS + after, at=look, done=filled.append)
    assert modes == [True] * (WARMUP + STEPS) + [False] * after
    assert len(filled) == (after >= 3)
    assert report.steps == STEPS
    assert report.step_ms > 1.4 * PLAIN
    assert abs(report.model_error) < 0.01
    if after < 2:
        assert report.alone_ms == 0.0
        assert report.replay_ms > 1.4 * PLAIN
    else:
        assert report.alone_ms == pytest.approx(PLAIN + ALONE, rel=1e-3)
        assert report.replay_ms == pytest.approx(PLAIN + ALONE, rel=0.02)
        assert Report.from_json(report.to_json()).alone_ms == report.alone_ms
        assert f"without it, of which the shortest took {report.alone_ms:.2f} ms." in " ".join(report.table().split())


def test_of_a_loop_that_the_host_bounds() -> None:
    """To a hundredth, and what is left out is what was there."""
    report = measure(12, host_bound)
    assert report.alone_ms == pytest.approx(HOST + ALONE, rel=1e-3)
    assert report.replay_ms == pytest.approx(report.alone_ms, rel=0.015)
    assert report.own_ms == pytest.approx(302 * DISPATCH * 1e3, rel=0.02)


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_work_that_is_left_at_the_end_belongs_to_the_next_step(steps: int) -> None:
    def tail() -> None:
        host_bound()
        x = torch.ones(3)
        for _ in range(6):
            x.cos()

    report = measure(WARMUP + steps + 3, tail, steps=steps)
    # The GPU has some of it still to do when the next step begins, which hides it.
    assert report.alone_ms == pytest.approx(HOST + ALONE + 7 * 10e-3, rel=1e-3)
    assert report.own_ms == pytest.approx(308 * DISPATCH * 1e3, rel=0.03)


@pytest.mark.parametrize("stall", [2e-3, 100e-3])
def test_a_step_that_is_held_up_is_no_sign_of_the_timer(stall: float) -> None:
    report = measure(12, host_bound, lambda gpu, index: gpu.host(stall if index == 3 else 0.0))
    assert report.replay_ms == pytest.approx(HOST + stall * 1e3 / STEPS, rel=0.03)
    assert report.own_ms == pytest.approx(302 * DISPATCH * 1e3, rel=0.03)


def test_nor_is_one_with_more_ops() -> None:
    report = measure(12, host_bound, lambda gpu, index: [host_bound() for _ in range(3 * (index == 3))])
    assert report.replay_ms == pytest.approx(HOST * 7 / 4, rel=0.03)
    assert report.own_ms == pytest.approx(302 * DISPATCH * 1e3 * 7 / 4, rel=0.03)


@pytest.mark.parametrize("longer", [(5,), (6,), (7,), (6, 7)])
def test_a_longer_step_among_those_alone(longer: tuple[int, ...]) -> None:
    """An evaluation, say. The other one tells; if there is none, nothing is told."""
    report = measure(12, at=lambda gpu, index: gpu.host(1.0 if index in longer else 0.0))
    if longer == (6, 7):
        assert report.alone_ms == 0.0
        assert report.replay_ms > 1.4 * PLAIN
    else:
        assert report.alone_ms == pytest.approx(PLAIN + ALONE, rel=1e-3)


@pytest.mark.parametrize("captured", [(4,), (5,), (6,), (7,), (5, 6), (5, 7), (4, 5, 6, 7, 8), (6, 8)])
def test_steps_that_end_while_a_graph_is_captured_are_passed_over(captured: tuple[int, ...]) -> None:
    """Two in a row are needed, and three in all."""

    def capture(gpu: FakeGpu, index: int) -> None:
        gpu.captures = index in captured

    report = measure(16, host_bound, capture)
    assert report.steps == STEPS
    assert report.alone_ms == (0.0 if captured == (6, 8) else pytest.approx(HOST + ALONE, rel=1e-3))
    # Where none is wanted, the report waits for a step that can be waited for.
    report = measure(16, host_bound, capture, probe_ms=1.0)
    assert (report.steps, report.alone_ms) == (STEPS, 0.0)


@pytest.mark.parametrize("counted", range(3, 10))
def test_a_script_that_marks_its_steps_late(counted: int) -> None:
    """What the optimizer's steps had measured until then stays; of marks that come after it nothing is learnt."""
    gpu = Dispatching()
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    x = torch.ones(3)
    with Handing(gpu, {"aten::exp": 30e-6}), find_syncs(warmup=WARMUP, steps=STEPS, gpu=gpu) as report:
        for _ in range(8):
            for _ in range(counted):
                x.exp().sum().item()
                optimizer.step()
            step()
    assert report.steps == STEPS
    of_the_optimizer = counted > WARMUP + STEPS - 1
    assert report.calls == (1.0 if of_the_optimizer else counted)
    if of_the_optimizer and counted < WARMUP + STEPS + 3:
        assert report.alone_ms == 0.0


def test_marks_that_come_late_and_often() -> None:
    """Of parts of a step nothing is learnt about whole ones."""
    gpu = Dispatching()
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with Handing(gpu, {"aten::sin": 3e-6}), find_syncs(warmup=WARMUP, steps=STEPS, gpu=gpu) as report:
        for index in range(9):
            for _ in range(4):
                host_bound()
                if index >= WARMUP + STEPS:
                    step()
            optimizer.step()
    assert (report.steps, report.calls, report.alone_ms) == (STEPS, 4.0, 0.0)


@pytest.mark.parametrize("after", [0, 2, 3, 4])
def test_the_profiler_comes_last(after: int) -> None:
    report = measure(WARMUP + STEPS + after, profile=1)
    assert (report.truth is None) == (after < 3)
    assert report.notes == (["The block ended before its steps under the profiler."] if after < 3 else [])
