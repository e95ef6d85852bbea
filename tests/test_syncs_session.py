"""Steps, warm-up and what is left behind."""

from __future__ import annotations

import inspect
import random
import time
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch

from fake_gpu import Card, FakeGpu, fake_card
from syncfree_ext.syncs import collect, find_syncs, internals, no_sync, step, steps
from syncfree_ext.syncs.gpu import Anchor, CudaGpu
from syncfree_ext.syncs.timer import Timer


def train(steps: int, *optimizers: torch.optim.Optimizer) -> None:
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.step()
        torch.ones(2).sum().item()


def optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1)


def test_a_step_ends_with_the_optimizer() -> None:
    with fake_card() as gpu, find_syncs(warmup=2, steps=3, gpu=gpu) as report:
        train(10, optimizer())
    assert (report.steps, [row.calls for row in report.rows]) == (3, [1.0])
    assert report.notes == []


def test_of_two_optimizers_the_first_is_the_clock() -> None:
    with fake_card() as gpu, find_syncs(warmup=1, steps=3, gpu=gpu) as report:
        train(10, optimizer(), optimizer())
    assert (report.steps, [row.calls for row in report.rows]) == (3, [1.0])


def test_an_optimizer_that_is_gone_is_the_clock_no_longer() -> None:
    with fake_card() as gpu, find_syncs(warmup=1, steps=3, gpu=gpu) as report:
        first = optimizer()
        first.step()
        second = optimizer()
        del first
        train(10, second)
    assert report.steps == 3


def test_marks_overrule_the_optimizer() -> None:
    with fake_card() as gpu, find_syncs(warmup=2, steps=3, gpu=gpu) as report:
        clock = optimizer()
        for _ in range(8):
            train(2, clock, clock)
            step()
    assert (report.steps, [row.calls for row in report.rows]) == (3, [2.0])


def test_lines_of_forward_are_forgotten_with_the_step() -> None:
    w = torch.ones(2, 2, requires_grad=True)
    finder = find_syncs(warmup=1, steps=3, gpu=FakeGpu())
    noted = []
    with finder:
        for _ in range(4):
            (w @ w).sum().backward()
            noted.append(sum(len(thread.lines) for thread in finder._timer._threads.values()))
            step()
            assert not any(thread.lines for thread in finder._timer._threads.values())
    assert noted[1:] == [noted[1]] * 3
    assert noted[1] > 0


def test_marks_without_a_finder_do_nothing() -> None:
    step()


def test_too_few_steps_are_said() -> None:
    with fake_card() as gpu, find_syncs(warmup=1, steps=9, gpu=gpu) as report:
        train(5, optimizer())
    assert report.steps == 4
    assert report.notes == ["The block ended after 4 of 9 measured steps."]


def test_no_step_is_said() -> None:
    with fake_card() as gpu, find_syncs(warmup=3, steps=9, gpu=gpu) as report:
        torch.ones(2).sum().item()
    assert (report.steps, report.rows) == (0, [])
    assert "Nothing was measured" in report.notes[0]


def test_a_block_without_steps_is_one_when_measured_from_its_start() -> None:
    with fake_card() as gpu, find_syncs(warmup=0, steps=1, gpu=gpu) as report:
        torch.ones(2).sum().item()
    assert (report.steps, len(report.rows)) == (1, 1)


def test_the_finder_waits_before_and_after_only() -> None:
    with fake_card() as gpu, find_syncs(warmup=3, steps=5, gpu=gpu):
        clock = optimizer()
        for index in range(14):
            clock.step()
            assert gpu.calibrations == (0 if index < 1 else 1 if index < 10 else 2)


def test_what_the_gpu_still_has_to_do_at_the_start_is_known() -> None:
    """A read in the first op of a step waits for the last step's work, in the first measured step too."""
    gpu = FakeGpu()
    x = torch.ones(3)
    with Card(gpu, {"aten::exp": 5e-3}), find_syncs(warmup=3, steps=2, gpu=gpu) as report:
        for _ in range(8):
            x.sum().item()
            x.exp()
            step()
    (row,) = report.rows
    assert row.blocked_ms == pytest.approx(5.0, rel=0.01)
    assert report.replay_ms == pytest.approx(report.step_ms + 5.0 / 2, rel=0.01)  # and what it still has at the end
    assert abs(report.model_error) < 0.01


def test_everything_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = internals.top_mode(), warnings.showwarning, list(warnings.filters), torch._C._only_lift_cpu_tensors()
    with pytest.raises(KeyError), find_syncs(warmup=1, steps=5, gpu=FakeGpu()):
        train(3, optimizer())
        raise KeyError
    assert before == (
        internals.top_mode(), warnings.showwarning, list(warnings.filters), torch._C._only_lift_cpu_tensors()
    )  # fmt: skip


def test_an_error_of_the_block_is_not_masked() -> None:
    class Fails(FakeGpu):
        def calibrate(self) -> None:
            if self.calibrations:
                raise RuntimeError("the GPU is gone")
            super().calibrate()

    with pytest.raises(KeyError), find_syncs(warmup=1, steps=5, gpu=Fails()) as report:
        train(3, optimizer())
        raise KeyError
    assert "the GPU is gone" in report.notes[-1]
    assert internals.top_mode() is None
    with pytest.raises(RuntimeError, match="the GPU is gone"), find_syncs(warmup=1, steps=5, gpu=Fails()):
        train(3, optimizer())
    assert internals.top_mode() is None


def test_what_comes_after_the_last_whole_step_does_not_count() -> None:
    with fake_card() as gpu, find_syncs(warmup=1, steps=5, gpu=gpu) as report:
        clock = optimizer()
        for _ in range(3):
            clock.step()
        for _ in range(10):
            torch.ones(2).sum().item()
    assert (report.steps, report.rows) == (2, [])


def test_other_hooks_of_the_optimizer_go_on() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    calls = []
    with fake_card() as gpu, find_syncs(warmup=1, steps=1, gpu=gpu):
        handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
        train(5, optimizer())
        handle.remove()
    assert len(calls) == 5


def test_inside_no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finder's own waits are its own business."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    class Waits(FakeGpu):
        def calibrate(self) -> None:
            torch.cuda.synchronize()
            super().calibrate()

        def pinned(self, engine: str, size: int) -> float | None:
            torch.cuda.synchronize()
            return None

    gpu = Waits()
    gpu.type = "meta"
    with no_sync() as checked, Card(gpu), find_syncs(warmup=1, steps=1, gpu=gpu) as report:
        for _ in range(5):
            torch.ones(4).to("meta")
            step()
    assert (report.steps, sum(checked.allowed.values())) == (1, 3)
    assert not checked.found
    assert [row.kind for row in report.rows] == ["pageable copy"]
    assert len(report.notes) == 1
    assert report.notes[0].startswith("How fast copies from pinned memory are is not known")


def test_a_mode_of_the_script_may_lie_on_top() -> None:
    class Passes(internals.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    clock = optimizer()
    with fake_card() as gpu, find_syncs(warmup=1, steps=1, gpu=gpu) as report:
        with Passes() as own:
            train(4, clock)
            assert internals.top_mode() is own
        assert isinstance(internals.top_mode(), Timer)
        train(1, clock)
        assert isinstance(internals.top_mode(), Card)  # the first step without the script's mode takes ours away
    assert report.steps == 1
    assert internals.top_mode() is None


def test_probe_queues_work_before_each_step() -> None:
    with fake_card() as gpu, find_syncs(warmup=2, steps=3, probe_ms=20.0, gpu=gpu) as report:
        train(10, optimizer())
    (row,) = report.rows
    assert row.blocked_ms == pytest.approx(20.0, rel=0.1)
    assert report.probe_ms == 20.0


def test_without_a_device_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncfree_ext.syncs.session.current_gpu", lambda: None)
    with find_syncs(warmup=1, steps=2) as report:
        assert internals.top_mode() is None
        train(5, optimizer())
    assert (report.steps, report.rows, report.device) == (2, [], "")
    assert "no CUDA device" in report.notes[0]


@pytest.mark.parametrize(
    "options", [{"warmup": -1}, {"steps": 0}, {"profile": -1}, {"probe_ms": -1.0}, {"slow_us": 0.0}]
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"find_syncs: .*{next(iter(options))}"):
        find_syncs(**options)


def test_costs_know_what_the_timer_and_its_events_take(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(FakeGpu):
        type = "cuda"

        def recording(self) -> float:
            return 7e-6

    seen: list[dict[str, Any]] = []

    def build(*arguments: Any) -> Any:
        seen.append(inspect.signature(collect.build).bind(*arguments).arguments)
        return collect.build(*arguments)

    monkeypatch.setattr("syncfree_ext.syncs.session.own_time", lambda *_: 3e-6)
    monkeypatch.setattr("syncfree_ext.syncs.session.build", build)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    gpu = Late()
    with Card(gpu), find_syncs(warmup=1, steps=2, gpu=gpu):
        train(4, optimizer())
    assert [(call["own"], call["recording"]) for call in seen] == [(3e-6, 7e-6)]


@pytest.mark.parametrize("after", [1, 4])
def test_a_gpu_that_has_failed_is_left_behind(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The script's own error is the one that is raised, and nothing of the finder stays in place."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def failed(*_: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    gpu = CudaGpu()
    gpu._ready = [object()]  # type: ignore[list-item]
    for name in ("current_device", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, failed)
    gpu.prepare(0)
    assert gpu._ready == []

    class Fails(FakeGpu):
        def prepare(self, events: int) -> None:
            asked.append((events, internals.top_mode()))
            if not events:
                failed()

    asked: list[Any] = []
    gone = Fails()
    with pytest.raises((KeyError, RuntimeError)), Card(gone) as card, find_syncs(warmup=2, steps=3, gpu=gone):
        for index in range(9):
            (torch.ones(2) + 1).sum().item()
            if index == after:
                raise KeyError("the script's")
            step()
    assert asked[-1] == (0, card)
    assert steps._listeners == []
    assert internals.top_mode() is None
    assert not torch._C._only_lift_cpu_tensors()


class Stamp:
    """An event of a simulated GPU clock, in seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def elapsed_time(self, other: Stamp) -> float:
        """Milliseconds until another one."""
        return (other.seconds - self.seconds) * 1e3


@pytest.mark.parametrize("drift", [0.0, 5e-5, -5e-5])
@pytest.mark.parametrize("late", [0.0, 2e-3, -2e-3])
@pytest.mark.parametrize("which", [0, 1])
def test_a_late_calibration_bends_no_clock(
    monkeypatch: pytest.MonkeyPatch, drift: float, late: float, which: int
) -> None:
    """The clocks' drift is taken out. A calibration that others' work held up is no drift: times are where the other
    calibration and the GPU say, to the millionths that its clock may really be off."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    gpu = CudaGpu()
    rate = 1.0 + drift
    hosts, events = [100.0, 100.0 + 0.040 * rate], [Stamp(7.0), Stamp(7.040)]
    within = [5e-6, 5e-6]
    hosts[which] += late
    within[which] += 2 * abs(late)
    gpu._anchors = list(map(Anchor, within, hosts, events))  # type: ignore[arg-type]
    begin, finish = gpu.resolve([Stamp(7.010), Stamp(7.030)])  # type: ignore[list-item]
    allowed = 2e-4 if late else 1e-9
    assert finish - begin == pytest.approx(0.020 * rate, rel=2 * allowed)
    assert begin == pytest.approx(100.0 + 0.010 * rate, abs=0.04 * 2 * allowed)


@pytest.mark.parametrize(("turn", "held_up"), [(0.0, 5e-3), (8e-6, 5e-3), (1.5e-3, 1e-4)])
def test_a_calibration_beside_others_is_as_exact(
    monkeypatch: pytest.MonkeyPatch, rng: torch.Generator, turn: float, held_up: float
) -> None:
    """Each event has to wait for the GPU's turn, and the host is held up now and then."""
    host = 100.0
    draw = random.Random(int(torch.randint(2**31, (), generator=rng)))

    def passes(seconds: float) -> float:
        nonlocal host
        host += seconds + (2e-3 if draw.random() < held_up else 0.0)
        return host

    class Event(Stamp):
        def query(self) -> bool:
            asked = passes(1e-6)
            passes(1e-6)
            return asked >= self.seconds

    def record() -> Event:
        passes(3e-6)
        return Event(passes(3e-6) + turn * (0.5 + draw.random()))

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    gpu = CudaGpu()
    gpu.now = lambda: passes(0.1e-6)
    gpu.record = record  # type: ignore[assignment]
    gpu.calibrate()
    (anchor,) = gpu._anchors
    # Between two queries, or recording and a query, lie 9 us at most if nothing holds the host up.
    assert anchor.host == pytest.approx(anchor.event.seconds, abs=6e-6)  # type: ignore[attr-defined]
    assert gpu.recording() == (50e-6 if turn > 1e-3 else pytest.approx(5e-6 + turn, rel=0.5))


@pytest.mark.cuda
@pytest.mark.alone
def test_clocks_agree() -> None:
    """Work of known length, timed by events, has that length on the host's clock, and ends when a wait for it ends."""
    gpu = CudaGpu()
    gpu.calibrate()
    gpu.backlog(0.02)
    start = gpu.record()
    gpu.backlog(0.02)
    end = gpu.record()
    torch.cuda.synchronize()
    now = gpu.now()
    gpu.calibrate()
    begin, finish = gpu.resolve([start, end])
    assert finish - begin == pytest.approx(start.elapsed_time(end) * 1e-3, rel=1e-3)
    assert abs(finish - now) < 1e-3


@pytest.mark.cuda
@pytest.mark.alone
def test_events_go_to_the_current_stream() -> None:
    """One in a stream without work is done while another stream still has some."""
    gpu, side = CudaGpu(), torch.cuda.Stream()
    gpu.calibrate()
    gpu.backlog(0.05)
    behind = gpu.record()
    with torch.cuda.stream(side):
        assert gpu.stream() == side.stream_id
        beside = gpu.record()
        beside.synchronize()
        assert not behind.query()
    assert gpu.stream() == torch.cuda.current_stream().stream_id
    assert not gpu.record().query()
    torch.cuda.synchronize()


@pytest.mark.cuda
def test_events_that_were_made_beforehand() -> None:
    """They are used up, then others are made; each has its own time, in the stream that is current."""
    gpu, side = CudaGpu(), torch.cuda.Stream()
    gpu.prepare(2)
    gpu.calibrate()  # uses them: more than there are
    gpu.prepare(2)
    prepared = set(map(id, gpu._ready))
    time.sleep(0.2)
    first, number = gpu.mark()
    assert number == torch.cuda.current_stream().stream_id
    with torch.cuda.stream(side):
        second, other = gpu.mark()
    third, again = gpu.mark()
    assert (other, again) == (side.stream_id, number)
    assert {id(first), id(second)} == prepared
    assert id(third) not in prepared
    torch.cuda.synchronize()
    gpu.calibrate()
    times = gpu.resolve([first, second, third])
    assert all(abs(b - a) < 0.1 for a, b in pairwise(times))  # not the time at which one was prepared
    gpu.prepare(3)
    gpu.prepare(0)
    assert gpu._ready == []


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_events_of_another_device() -> None:
    """One that was made for a device cannot be recorded on another."""
    gpu = CudaGpu()
    gpu.prepare(3)
    with torch.cuda.device(1):
        gpu.mark()[0].synchronize()
        assert len(gpu._ready) == 3
    gpu.mark()[0].synchronize()
    assert len(gpu._ready) == 2


@pytest.mark.cuda
@pytest.mark.alone
@pytest.mark.parametrize("engine", ["to host", "to device"])
def test_pinned_copies_take_what_is_said(engine: str) -> None:
    """A copy of another size than the one that was measured, with pinned memory."""
    host = torch.empty(2**26, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    source, target = (device, host) if engine == "to host" else (host, device)
    gpu = CudaGpu()
    start = gpu.record()
    target.copy_(source, non_blocking=True)
    end = gpu.record()
    torch.cuda.synchronize()
    with torch.device("cuda"):  # wherever tensors are made by default
        seconds = gpu.pinned(engine, host.nbytes)
    # A launch is a part of both, and of the smaller one a larger part.
    assert seconds == pytest.approx(start.elapsed_time(end) * 1e-3, rel=0.3)


@pytest.mark.cuda
def test_allocations_are_counted() -> None:
    gpu = CudaGpu()
    kept = torch.empty(1, device="cuda")
    before = gpu.allocations()
    torch.cuda.empty_cache()
    again = gpu.allocations()
    del kept
    large = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    assert before <= again < gpu.allocations()
    del large


@pytest.mark.cuda
@pytest.mark.alone
def test_profiler_agrees() -> None:
    """Over a loop of reads, torch.profiler sees at least those, and none in a function that has no row."""
    x = torch.ones(1024, 1024, device="cuda")
    with find_syncs(warmup=2, steps=3, profile=3) as report:
        for _ in range(12):
            (x @ x).sum().item()
            step()
    assert [(row.kind, row.calls) for row in report.rows] == [("scalar read", 1.0)]
    assert report.truth is not None
    assert report.truth.steps == 3
    assert sum(report.truth.calls.values()) >= 1.0
    assert report.truth.unmatched == []
