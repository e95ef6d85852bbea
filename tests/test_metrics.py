"""MetricBuffer against plain Python sums: each reduction, each sentence of its contract."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncfree_ext import AsyncScalars, MetricBuffer

ALL = {"s": "sum", "m": "mean", "l": "last", "lo": "min", "hi": "max", "r": "ratio"}


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or a == pytest.approx(b, rel=1e-12, abs=1e-300)


def naive(kind: str, values: list[Any], ratio_default: float = math.nan) -> float:
    if kind == "sum":
        return math.fsum(values)
    if not values:
        return ratio_default if kind == "ratio" else math.nan
    if kind == "mean":
        return math.fsum(values) / len(values)
    if kind == "last":
        return float(values[-1])
    if kind == "ratio":
        den = math.fsum(d for _, d in values)
        return ratio_default if den == 0 else math.fsum(n for n, _ in values) / den
    if any(math.isnan(v) for v in values):
        return math.nan
    return min(values) if kind == "min" else max(values)


def as_metric(value: float, form: int, device: torch.device) -> Any:
    """The same number as a number, on the device, or on the CPU."""
    if form == 0:
        return value
    return torch.tensor([value], dtype=torch.float64, device=device if form == 1 else "cpu")


@pytest.mark.parametrize("adds", [0, 1, 2, 17])
def test_against_the_naive_version(adds: int, rng: torch.Generator, device: torch.device) -> None:
    """Names come and go, as tensors and as numbers, over several intervals."""
    buffer = MetricBuffer(device, ALL)
    for _ in range(3):
        seen: dict[str, list[Any]] = {name: [] for name in ALL}
        for _ in range(adds):
            metrics: dict[str, Any] = {}
            for name, kind in ALL.items():
                if torch.rand((), generator=rng) < 0.3:
                    continue
                a, b = torch.randn(2, generator=rng, dtype=torch.float64).tolist()
                form = int(torch.randint(3, (), generator=rng))
                seen[name].append((a, abs(b)) if kind == "ratio" else a)
                a = as_metric(a, form, device)
                metrics[name] = (a, as_metric(abs(b), (form + 1) % 3, device)) if kind == "ratio" else a
            buffer.add(**metrics)
        kept = buffer.compute(reset=False)
        got = buffer.compute()
        for name, kind in ALL.items():
            assert same(got[name], naive(kind, seen[name])), name
            assert same(got[name], kept[name])


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.sampled_from(list(ALL)), min_size=1, max_size=12),
    st.lists(st.floats(-1e100, 1e100) | st.sampled_from([math.nan, math.inf]), min_size=12, max_size=12),
)
def test_any_order(names: list[str], values: list[float]) -> None:
    buffer = MetricBuffer("cpu", ALL)
    seen: dict[str, list[Any]] = {name: [] for name in ALL}
    for name, value in zip(names, values, strict=False):
        metric = (value, 2.0) if name == "r" else value
        seen[name].append(metric)
        buffer.add(**{name: metric})
    for name, got in buffer.compute().items():
        if not any(math.isinf(v if isinstance(v, float) else v[0]) for v in seen[name]):
            assert got == pytest.approx(naive(ALL[name], seen[name]), rel=1e-9, abs=1e90, nan_ok=True), name


def test_the_value_is_taken_now(device: torch.device) -> None:
    buffer = MetricBuffer(device, ALL)
    x = torch.ones((), device=device)
    for _ in range(3):
        buffer.add(**{name: (x, x) if kind == "ratio" else x for name, kind in ALL.items()})
        x.add_(1)
    x.fill_(1000)
    assert buffer.compute() == {"s": 6.0, "m": 2.0, "l": 3.0, "lo": 1.0, "hi": 3.0, "r": 1.0}


def test_sums_are_float64(device: torch.device) -> None:
    buffer = MetricBuffer(device, {"s": "sum"})
    for _ in range(100):
        buffer.add(s=torch.tensor(2**24 + 1, device=device, dtype=torch.int32))
        buffer.add(s=torch.tensor(0.5, device=device, dtype=torch.bfloat16))
    assert buffer.compute() == {"s": 100 * (2**24 + 1.5)}


def test_empty_metrics(device: torch.device) -> None:
    got = MetricBuffer(device, ALL).compute()
    assert got.pop("s") == 0.0
    assert all(math.isnan(value) for value in got.values())
    buffer = MetricBuffer(device, {"r": "ratio"}, ratio_default=-1.0)
    assert buffer.compute() == {"r": -1.0}
    buffer.add(r=(torch.zeros((), device=device), 0))
    assert buffer.compute() == {"r": -1.0}
    assert MetricBuffer(device).compute() == {}


def test_nan_wins_in_extremes(device: torch.device) -> None:
    nan = torch.tensor(math.nan, device=device)
    for first, second in ((1.0, nan), (nan, 1.0), (math.nan, 1.0)):
        buffer = MetricBuffer(device, {"lo": "min", "hi": "max"})
        buffer.add(lo=first, hi=first)
        buffer.add(lo=second, hi=second)
        assert all(math.isnan(value) for value in buffer.compute().values())


def test_new_names_take_the_default(device: torch.device) -> None:
    buffer = MetricBuffer(device, {"a": "max", "l": "last"}, default="sum")
    buffer.add(a=1, l=7)
    buffer.add(a=torch.tensor(5.0, device=device), b=2)
    buffer.add(b=torch.tensor(3.0, device=device), c=1)
    assert buffer.reductions == {"a": "max", "l": "last", "b": "sum", "c": "sum"}
    assert buffer.compute() == {"a": 5.0, "l": 7.0, "b": 5.0, "c": 1.0}


def test_any_name() -> None:
    buffer = MetricBuffer("cpu")
    buffer.add(**{"self": 1, "loss/train": 2, "": 3})
    assert buffer.compute() == {"self": 1.0, "loss/train": 2.0, "": 3.0}


def test_many_names(device: torch.device) -> None:
    kinds = list(ALL.values())
    buffer = MetricBuffer(device, {f"n{i}": kinds[i % 6] for i in range(200)})
    x = torch.full((), 3.0, device=device)
    for _ in range(2):
        buffer.add(**{f"n{i}": (x, 2) if kinds[i % 6] == "ratio" else x for i in range(200)})
    expected = {"sum": 6.0, "ratio": 1.5}
    assert buffer.compute() == {f"n{i}": expected.get(kinds[i % 6], 3.0) for i in range(200)}


def test_gradients_are_not_tracked(device: torch.device) -> None:
    x = torch.ones((), device=device, requires_grad=True)
    buffer = MetricBuffer(device, ALL)
    buffer.add(**{name: (x * 2, x) if kind == "ratio" else x * 2 for name, kind in ALL.items()})
    assert not any(value.requires_grad for value in buffer.reduced().values())


def test_numbers_of_numpy() -> None:
    np = pytest.importorskip("numpy")
    buffer = MetricBuffer("cpu", {"a": "sum"})
    buffer.add(a=np.float32(1.5))
    buffer.add(a=np.int64(2))
    assert buffer.compute() == {"a": 3.5}


def test_inference_mode_leaves_no_trace(device: torch.device) -> None:
    """What is made in an evaluation can be added to in training."""
    with torch.inference_mode():
        buffer = MetricBuffer(device, {"early": "max"})
        buffer.add(loss=torch.ones((), device=device))
    buffer.add(loss=torch.full((), 2.0, device=device), early=3)
    with torch.inference_mode():
        buffer.add(val_loss=torch.ones((), device=device), loss=3)
        state = buffer.state_dict()
    buffer.add(val_loss=3, loss=4)
    assert buffer.compute() == {"early": 3.0, "loss": 2.5, "val_loss": 2.0}
    buffer.load_state_dict(state)
    buffer.add(val_loss=3, loss=4)
    assert buffer.compute() == {"early": 3.0, "loss": 2.5, "val_loss": 2.0}


@pytest.mark.parametrize("way", ["pickle", "copy", "deepcopy", "save"])
def test_a_copy_goes_on_by_itself(way: str, device: torch.device) -> None:
    reductions: dict[str, Any] = {"a": "sum", "b": "last", "c": "min", "d": "ratio"}
    buffer = MetricBuffer(device, reductions, default="max", ratio_default=-1.0)
    buffer.add(a=1, b=2, c=3, d=(1, 2), e=5)
    if way == "save":
        file = io.BytesIO()
        torch.save(buffer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = pickle.loads(pickle.dumps(buffer)) if way == "pickle" else getattr(copy, way)(buffer)
    other.add(a=5)
    other.add(a=5)
    other.add(f=1)
    buffer.add(b=7)
    assert buffer.compute() == {"a": 1.0, "b": 7.0, "c": 3.0, "d": 0.5, "e": 5.0}
    assert other.compute() == {"a": 11.0, "b": 2.0, "c": 3.0, "d": 0.5, "e": 5.0, "f": 1.0}
    other.add(g=1)
    assert (other.reductions["g"], other.compute()["d"], buffer.reductions) == ("max", -1.0, {**reductions, "e": "max"})


class Named(MetricBuffer):
    extra: Any = None


def test_a_copy_keeps_attributes(device: torch.device) -> None:
    buffer = Named(device, {"a": "sum"})
    buffer.extra = ["kept"]
    buffer.add(a=2)
    for other in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        assert (type(other), other.extra, other.device) == (Named, ["kept"], device)
        assert other.compute() == {"a": 2.0}


def test_a_copy_of_ranks_is_refused() -> None:
    buffer = MetricBuffer("cpu")
    buffer.group = object()  # type: ignore[assignment]
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="MetricBuffer: a buffer with a process group cannot be copied; take its"):
            way(buffer)


def test_compute_async(device: torch.device) -> None:
    buffer = MetricBuffer(device, ALL)
    with AsyncScalars(device, [*ALL, "lr"], depth=2) as ring:
        for interval in range(4):
            for step in range(3):
                x = torch.tensor(float(10 * interval + step), device=device)
                buffer.add(**{name: (x, 1) if kind == "ratio" else x for name, kind in ALL.items()})
            buffer.compute_async(ring, interval)
        buffer.compute_async(ring, "again", reset=False)
        got = dict(ring.flush())
    assert got[2] == {"s": 63.0, "m": 21.0, "l": 22.0, "lo": 20.0, "hi": 22.0, "r": 21.0}
    assert got["again"]["s"] == 0.0
    assert math.isnan(got["again"]["l"])


def test_compute_async_needs_the_names(device: torch.device) -> None:
    buffer = MetricBuffer(device, {"a": "sum"})
    buffer.add(a=1)
    with AsyncScalars(device, ["b"]) as ring, pytest.raises(KeyError, match="got 'a'"):
        buffer.compute_async(ring, 0)
    assert buffer.compute() == {"a": 1.0}, "a refused compute_async resets nothing"


def test_state_dict(rng: torch.Generator, device: torch.device) -> None:
    """Saved in the middle of an interval, loaded into other buffers: the interval goes on."""

    def metrics(i: int) -> dict[str, Any]:
        x = torch.tensor(float(i), device=device)
        return {name: (x, i + 1) if kind == "ratio" else x for name, kind in ALL.items()}

    whole, first = MetricBuffer(device, ALL), MetricBuffer(device, ALL)
    for i in range(6):
        whole.add(**metrics(i))
        if i < 3:
            first.add(**metrics(i))
    state = first.state_dict()
    first.add(**metrics(99))  # the state is a copy
    expected = whole.compute()
    for names in (ALL, dict(reversed(ALL.items())), {}, {"hi": "max", "other": "sum"}):
        second = MetricBuffer(device, names)
        second.load_state_dict(state)
        for i in range(3, 6):
            second.add(**metrics(i))
        got = second.compute()
        assert {name: got[name] for name in ALL} == expected
    cpu = MetricBuffer("cpu", ALL)
    cpu.load_state_dict(torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, state))
    assert cpu.compute()["s"] == 3.0


def test_load_state_dict_replaces(device: torch.device) -> None:
    buffer = MetricBuffer(device, {"a": "sum"})
    buffer.add(a=5)
    buffer.load_state_dict(MetricBuffer(device, {"a": "sum"}).state_dict())
    assert buffer.compute() == {"a": 0.0}
    with pytest.raises(ValueError, match="a is reduced by 'sum' here, got 'max'"):
        buffer.load_state_dict(MetricBuffer(device, {"a": "max"}).state_dict())


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        ({"s": (1, 2)}, TypeError, "s is reduced by 'sum' and must be one value"),
        ({"r": 1}, TypeError, "r is reduced by 'ratio' and must be a pair"),
        ({"r": (1, 2, 3)}, TypeError, r"r must be a pair \(numerator, denominator\), got 3"),
        ({"s": torch.ones(2)}, ValueError, r"s must have one element, got shape \(2,\)"),
        ({"s": torch.ones((), device="meta")}, ValueError, "s must be on cpu or the CPU, got meta"),
        ({"s": torch.ones((), dtype=torch.complex64)}, TypeError, "s must be real"),
        ({"s": torch.ones((), dtype=torch.uint16)}, TypeError, "s must be neither float8 nor unsigned .* torch.uint16"),
        ({"s": torch.ones((), dtype=torch.float8_e5m2)}, TypeError, "s must be neither float8 nor unsigned"),
        ({"s": "1"}, TypeError, "s must be a number or a tensor with one element, got str"),
    ],
)
def test_errors_of_add(metrics: dict[str, Any], error: type[Exception], message: str) -> None:
    buffer = MetricBuffer("cpu", ALL)
    with pytest.raises(error, match=f"syncfree_ext.MetricBuffer.add: {message}"):
        buffer.add(hi=3, **metrics)
    assert math.isnan(buffer.compute()["hi"]), "a refused add adds nothing"


def test_errors_at_construction() -> None:
    with pytest.raises(ValueError, match=r"a must be reduced by one of .* got 'median'"):
        MetricBuffer("cpu", {"a": "median"})
    with pytest.raises(ValueError, match="default must be reduced by one of"):
        MetricBuffer("cpu", default="avg")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device must be a CPU or CUDA device"):
        MetricBuffer("meta")
