"""NonFiniteGuard: the right step, at the right update, and never a false alarm."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncfree_ext import AsyncScalars, NonFiniteError, NonFiniteGuard
from syncfree_ext._slots import Lane

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def guard_of(device: torch.device | str, depth: int = 2) -> NonFiniteGuard:
    return NonFiniteGuard(AsyncScalars(device, ["unused"], depth=depth))


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("bad_step", [0, 3, 9])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_raises_exactly_depth_updates_later(bad: float, bad_step: int, depth: int, device: torch.device) -> None:
    guard = guard_of(device, depth)
    for step in range(bad_step + depth):
        guard.update(100 + step, torch.tensor(bad if step == bad_step else 1.0, device=device))
    with pytest.raises(NonFiniteError) as caught:
        guard.update(100 + bad_step + depth, torch.tensor(1.0, device=device))
    assert (caught.value.step, caught.value.count) == (100 + bad_step, 1)
    with pytest.raises(NonFiniteError, match=f"in step {100 + bad_step}; 1"):
        guard.update(0, 1.0)
    with pytest.raises(NonFiniteError, match=f"in step {100 + bad_step}; 1"):
        guard.check()


def test_check_finds_it_at_once(device: torch.device) -> None:
    guard = guard_of(device, 4)
    guard.update(1, torch.ones(3, device=device))
    guard.check()
    guard.update(2, torch.tensor([1.0, math.nan], device=device))
    guard.update(3, torch.tensor(math.inf, device=device))
    with pytest.raises(NonFiniteError) as caught:
        guard.check()
    assert caught.value.step == 2
    assert caught.value.count in (1, 2)


def test_the_first_step_and_the_count(device: torch.device) -> None:
    guard = guard_of(device, 6)
    for step, value in enumerate([1.0, math.nan, 1.0, math.inf, 2.0]):
        guard.update(step, torch.tensor(value, device=device))
    assert (int(guard._first), int(guard._count)) == (1, 2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_finite_values_are_fine(dtype: torch.dtype, device: torch.device) -> None:
    """Sums of them would overflow, as would a conversion to a narrower dtype."""
    largest = torch.finfo(dtype).max
    guard = guard_of(device)
    for step in range(4):
        guard.update(
            step,
            torch.full((1000,), largest, dtype=dtype, device=device),
            torch.tensor(-largest, dtype=dtype, device=device),
            torch.tensor(torch.finfo(torch.float64).max, dtype=torch.float64, device=device),
        )
    guard.check()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 1000, 70_001])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_anywhere(
    bad: float, size: int, dtype: torch.dtype, rng: torch.Generator, device: torch.device
) -> None:
    x = torch.randn(size, generator=rng).to(device, dtype)
    x[int(torch.randint(size, (), generator=rng))] = bad
    for tensors in ((x,), (torch.ones((), device=device), x, torch.ones(5, device=device, dtype=torch.float64))):
        guard = guard_of(device)
        guard.update(7, *tensors)
        with pytest.raises(NonFiniteError, match="in step 7"):
            guard.check()


def test_what_counts_as_finite(device: torch.device) -> None:
    guard = guard_of(device)
    guard.update(0)
    guard.update(1, torch.empty(0, device=device), torch.empty(3, 0, device=device))
    guard.update(2, torch.tensor(2**62, device=device), torch.tensor(True, device=device), 3, 1e308)
    guard.update(3, torch.zeros((), requires_grad=True, device=device) * 1, torch.ones((), dtype=torch.complex64))
    guard.update(4, torch.nn.utils.clip_grad_norm_([], 1.0))
    guard.check()


@pytest.mark.parametrize("bad", [math.nan, float("-inf"), torch.tensor(math.inf), torch.tensor([1.0, math.nan])])
def test_numbers_and_tensors_on_the_cpu(bad: Any, device: torch.device) -> None:
    guard = guard_of(device)
    guard.update(5, torch.ones(3, device=device), bad)
    with pytest.raises(NonFiniteError, match="in step 5"):
        guard.check()


def as_conjugate(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex64).conj()


def as_sparse(x: torch.Tensor) -> torch.Tensor:
    """The same place twice, not coalesced, as gradients of an Embedding are."""
    places = torch.zeros(1, x.numel(), dtype=torch.int64, device=x.device)
    return torch.sparse_coo_tensor(places, x, (4,), check_invariants=True)


def as_csr(x: torch.Tensor) -> torch.Tensor:
    return x.diag().to_sparse_csr()


def as_float8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e5m2)


KINDS = [torch.Tensor.cfloat, as_conjugate, as_sparse, as_csr, as_float8, torch._neg_view, torch.Tensor.half]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_kind_of_tensor(kind: Callable[[torch.Tensor], torch.Tensor], beside: bool, device: torch.device) -> None:
    guard = guard_of(device)
    others = [torch.ones(3, device=device)] if beside else []
    guard.update(1, kind(torch.tensor([1.0, 2.0], device=device)), *others)
    guard.check()
    guard.update(2, kind(torch.tensor([1.0, math.nan], device=device)), *others)
    with pytest.raises(NonFiniteError, match="in step 2; 1"):
        guard.check()


def test_made_in_inference_mode(device: torch.device) -> None:
    with torch.inference_mode():
        guard = guard_of(device)
        guard.update(1, torch.ones((), device=device))
    guard.update(2, torch.tensor(math.nan, device=device))
    with pytest.raises(NonFiniteError, match="in step 2; 1"):
        guard.check()
    guard.reset()
    guard.check()


def test_reset(device: torch.device) -> None:
    guard = guard_of(device)
    for step in (3, 4):
        guard.update(step, torch.tensor(math.nan, device=device))
    guard.reset()
    for step in (1, 2):
        guard.update(step, torch.tensor(1.0, device=device))
    guard.check()
    guard.update(3, torch.tensor(math.nan, device=device))
    with pytest.raises(NonFiniteError, match="in step 3; 1"):
        guard.check()


def test_poll_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Callable[[], None]] = []
    publish = Lane.publish

    def hold(self: Lane, values: Any, *args: Any, **options: Any) -> None:
        snapshot = [value.clone() for value in values]
        held.append(lambda: publish(self, snapshot, *args, **options))

    guard = guard_of("cpu", 3)
    monkeypatch.setattr(Lane, "publish", hold)
    guard.update(0, math.nan)
    guard.poll()
    held.pop(0)()
    with pytest.raises(NonFiniteError, match="in step 0"):
        guard.poll()


def test_poisoned_weights_are_not_saved(device: torch.device) -> None:
    """The loop of the class's documentation, with a bad step between two checkpoints."""
    weight, saved = torch.zeros(4, device=device), []
    ring = AsyncScalars(device, ["loss"], depth=8)

    def train() -> None:
        with ring:
            guard = NonFiniteGuard(ring)
            for step in range(20):
                weight.add_(math.nan if step == 8 else 1.0)
                loss = weight.sum()
                guard.update(step, loss)
                ring.put(step, {"loss": loss})
                if step % 5 == 4:
                    guard.check()
                    saved.append(weight.clone())

    with pytest.raises(NonFiniteError, match="in step 8"):
        train()
    assert len(saved) == 1
    assert all(bool(w.isfinite().all()) for w in saved)
    assert [tag for tag, _ in ring.poll()] == list(range(10)), "the values up to the exception are there"


def replays_of(
    guard: NonFiniteGuard, monkeypatch: pytest.MonkeyPatch, step: int, value: torch.Tensor
) -> Callable[[], None]:
    """What a replay of a captured update does: the same calls as under capture."""

    def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Lane, "stream", lambda _self: None)
            guard.update(step, value)

    return run


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("warm_up", [0, 2])
def test_under_capture_the_step_is_counted_on_the_device(
    warm_up: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    guard, x = guard_of("cpu", depth), torch.zeros(())
    for step in range(warm_up):
        guard.update(step, x)
    run = replays_of(guard, monkeypatch, 10, x)
    for n in range(9):
        x.fill_(math.nan if n in (4, 6) else 0.0)
        run()
        if n < 4:
            guard.poll()
            guard.check()
    for look in (guard.poll, guard.check):
        with pytest.raises(NonFiniteError) as caught:
            look()
        assert (caught.value.step, caught.value.count) == (14, 2)
    x.zero_()
    guard.reset()
    guard.poll()
    run()
    guard.check()


def test_the_error() -> None:
    error = pickle.loads(pickle.dumps(NonFiniteError(5, 2)))
    assert isinstance(error, FloatingPointError)
    assert (error.step, error.count) == (5, 2)
    assert str(error) == "a guarded value was NaN or infinite in step 5; 2 such step(s) by the time it was found"


def test_errors() -> None:
    with pytest.raises(TypeError, match="scalars must be an AsyncScalars, got str"):
        NonFiniteGuard("cpu")  # type: ignore[arg-type]
    guard = guard_of("cpu")
    with pytest.raises(TypeError, match="step must be an integer, got float"):
        guard.update(1.0, 2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"tensors\[1\] must be a number, got str"):
        guard.update(1, 2.0, "3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tensors\[0\] must be on the device"):
        guard.update(1, torch.ones(2, device="meta"))


# ----------------------------------------------------------------------------------------------------------- life spans


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many lanes were made, and how many were handed on. On CUDA each is page-locked memory that is never freed."""
    counts = {"made": 0, "recycled": 0}
    take, recycle = Lane._take, Lane.recycle
    made: list[Lane] = []  # here, not by another test whose garbage is collected now

    def counted_take(self: Lane, device: torch.device) -> Any:
        counts["made"] += 1
        made.append(self)
        return take(self, device)

    def counted_recycle(self: Lane) -> None:
        counts["recycled"] += any(lane is self for lane in made)
        recycle(self)

    monkeypatch.setattr(Lane, "_take", counted_take)
    monkeypatch.setattr(Lane, "recycle", counted_recycle)
    return counts


def test_a_guard_hands_its_memory_on(lanes: dict[str, int], device: torch.device) -> None:
    for step in range(3):
        with AsyncScalars(device, ["x"]) as ring:
            guard = NonFiniteGuard(ring)
            guard.update(step, torch.ones((), device=device))
        del ring, guard
    assert lanes == {"made": 12, "recycled": 12}


def test_a_guard_keeps_what_may_still_be_written(lanes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ring = AsyncScalars("cpu", ["x"])
    guard = NonFiniteGuard(ring)
    monkeypatch.setattr(Lane, "publish", lambda *_args, **_options: None)  # nothing arrives
    guard.update(0, torch.ones(()))
    ring._at_exit.clear()
    del guard
    assert lanes == {"made": 4, "recycled": 1}, "the lane of replays alone: nothing was captured"
    captured = NonFiniteGuard(ring)
    captured._captured = True
    ring._at_exit.clear()
    del captured
    assert lanes == {"made": 6, "recycled": 2}, "a graph may be replayed at any time"
