"""AsyncScalars: values, order, delivery, full rings, errors. What needs a device that lags is in tests/cuda."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import random
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch

from syncfree_ext import AsyncScalars, NonFiniteError, NonFiniteGuard, scalars
from syncfree_ext._slots import Lane, wait_until

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A device that lags: publishes are held back until the returned function runs the oldest of them."""
    held: list[Callable[[], None]] = []
    publish = Lane.publish

    def hold(self: Lane, values: Any, *args: Any, **options: Any) -> None:
        snapshot = [value.detach().clone() for value in values]
        held.append(lambda: publish(self, snapshot, *args, **options))

    def run_oldest() -> None:
        held.pop(0)()

    monkeypatch.setattr(Lane, "publish", hold)
    return run_oldest


def raises(error: type[Exception], call: Callable[[], None]) -> None:
    with pytest.raises(error):
        call()


def after(seconds: float, call: Callable[[], None]) -> threading.Thread:
    thread = threading.Timer(seconds, call)
    thread.start()
    return thread


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_values_of_any_dtype_are_exact(dtype: torch.dtype, rng: torch.Generator, device: torch.device) -> None:
    with AsyncScalars(device, {"f": torch.float64, "i": torch.int64}) as ring:
        for step in range(20):
            if dtype.is_floating_point:
                value = torch.randn((), generator=rng).mul(10.0 ** (step % 5)).to(device, dtype)
            else:
                value = torch.randint(-(2**62), 2**62, (), generator=rng).to(device, dtype)
            names = {"f": value} if dtype.is_floating_point else {"f": value, "i": value}
            ring.put(step, names)
            got = ring.get(step)
            assert got["f"] == float(value.double())
            assert type(got["f"]) is float
            if "i" in names:
                assert got["i"] == int(value)
                assert type(got["i"]) is int


def test_not_a_number_and_infinity(device: torch.device) -> None:
    special = [torch.nan, torch.inf, -torch.inf, -0.0, 5e-324, 1.7976931348623157e308]
    with AsyncScalars(device, [str(i) for i in range(len(special))]) as ring:
        values = {str(i): torch.tensor(v, dtype=torch.float64, device=device) for i, v in enumerate(special)}
        ring.put(0, values)
        ring.put(1, {name: v.item() for name, v in values.items()})
        for _, got in ring.flush():
            assert list(map(repr, got.values())) == list(map(repr, map(float, special)))


def test_int64_is_exact(device: torch.device) -> None:
    with AsyncScalars(device, {"a": torch.int64, "b": torch.float64, "c": torch.int64}) as ring:
        big = 2**63 - 1
        ring.put(None, {"a": torch.tensor(big, device=device), "b": torch.tensor(0.5, device=device), "c": -big - 1})
        assert ring.get(None) == {"a": big, "b": 0.5, "c": -big - 1}


def test_a_put_is_a_snapshot(device: torch.device) -> None:
    x = torch.zeros((), device=device)
    with AsyncScalars(device, ["x"], depth=1) as ring:
        got = []
        for step in range(50):
            x.add_(1)
            ring.put(step, {"x": x})
            x.mul_(1.0)
            got += ring.poll()
        x.fill_(-1)
        got += ring.flush()
    assert got == [(step, {"x": step + 1.0}) for step in range(50)]


def test_gradients_are_not_tracked(device: torch.device) -> None:
    x = torch.full((1, 1), 3.0, device=device, requires_grad=True)
    y = x * 2
    with AsyncScalars(device, ["x", "y"]) as ring:
        ring.put(0, {"x": x, "y": y})
        assert not ring._lane.slots.requires_grad
        assert ring.get(0) == {"x": 3.0, "y": 6.0}
    y.sum().backward()
    assert x.grad is not None


def test_any_layout(device: torch.device) -> None:
    base = torch.arange(12.0, device=device).view(3, 4)
    views = {"a": base[1, 2], "b": base[2:, :1], "c": base.T[3, 1:2], "d": torch.conj(base[0, 1] + 2j).imag}
    with AsyncScalars(device, list(views)) as ring:
        ring.put(0, views)
        assert ring.get(0) == {"a": 6.0, "b": 8.0, "c": 7.0, "d": -2.0}


def test_some_of_the_names_and_none(device: torch.device) -> None:
    x = torch.ones((), device=device)
    with AsyncScalars(device, ["a", "b"]) as ring:
        ring.put(0, {"a": x, "b": x * 2})
        ring.put(1, {"b": x * 3})
        ring.put(2, {})
        ring.put(3, {"b": 4, "a": True})
        got = ring.flush()
    assert got == [(0, {"a": 1.0, "b": 2.0}), (1, {"b": 3.0}), (2, {}), (3, {"b": 4.0, "a": 1.0})]
    assert [list(values) for _, values in got] == [["a", "b"], ["b"], [], ["b", "a"]]


def test_many_names(rng: torch.Generator, device: torch.device) -> None:
    """More than the parameters of one launch hold."""
    values = torch.randn(500, generator=rng, dtype=torch.float64)
    on_device = values.to(device)
    with AsyncScalars(device, [f"n{i}" for i in range(500)], depth=3) as ring:
        for step in range(5):
            ring.put(step, {f"n{i}": on_device[i] for i in range(500)})
        for _, got in ring.flush():
            assert list(got.values()) == values.tolist()


def test_tensors_on_the_cpu_are_numbers(device: torch.device) -> None:
    empty_norm = torch.nn.utils.clip_grad_norm_([], 1.0)
    with AsyncScalars(device, {"norm": torch.float64, "n": torch.int64}) as ring:
        ring.put("tag", {"norm": empty_norm, "n": torch.tensor(2**60 + 1)})
        assert ring.get("tag") == {"norm": 0.0, "n": 2**60 + 1}


# ---------------------------------------------------------------------------------------------------------------- order


def test_tags_are_any_objects(device: torch.device) -> None:
    tags = [None, 0, "a", (1, 2), [3], {"b": 4}, None, object()]
    with AsyncScalars(device, ["x"], depth=3) as ring:
        for i, tag in enumerate(tags):
            ring.put(tag, {"x": i})
        got = ring.flush()
    assert [tag for tag, _ in got] == tags
    assert [values["x"] for _, values in got] == list(range(len(tags)))


def test_tags_that_do_not_compare_as_one(device: torch.device) -> None:
    """Arrays and tensors are found by identity, among others and beside them."""
    np = pytest.importorskip("numpy")
    array, tensor = np.arange(3), torch.arange(3)
    tags: list[Any] = [array, "x", tensor, (array, 1), np.int64(7)]
    with AsyncScalars(device, ["x"], depth=8) as ring:
        for i, tag in enumerate(tags):
            ring.put(tag, {"x": i})
        assert ring.get("x") == {"x": 1.0}
        assert ring.get(tags[3]) == {"x": 3.0}
        assert ring.get(tensor) == {"x": 2.0}
        assert ring.get(7) == {"x": 4.0}
        with pytest.raises(KeyError, match="expected a tag that is on its way"):
            ring.get(np.arange(3))
        assert ring.get(array) == {"x": 0.0}


def test_numbers_of_numpy(device: torch.device) -> None:
    np = pytest.importorskip("numpy")
    with AsyncScalars(device, {"x": torch.float64, "n": torch.int64}) as ring:
        ring.put(0, {"x": np.float32(1.5), "n": np.int64(2)})
        ((_, values),) = ring.flush()
        assert values == {"x": 1.5, "n": 2}
        assert [type(value) for value in values.values()] == [float, int]


def test_a_ring_is_not_copied(device: torch.device) -> None:
    with AsyncScalars(device, ["x"]) as ring:
        for thing, what in ((ring, "ring"), (NonFiniteGuard(ring), "guard")):
            for way in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=f"a {what} holds memory that the device writes to"):
                    way(thing)


def test_get_takes_one_and_leaves_the_others(device: torch.device) -> None:
    with AsyncScalars(device, ["x"], depth=4) as ring:
        for step in (0, 1, 2, 1):
            ring.put(step, {"x": torch.tensor(10.0 * step, device=device)})
        assert ring.get(1, timeout=30) == {"x": 10.0}
        assert ring.get(2) == {"x": 20.0}
        assert ring.get(1) == {"x": 10.0}
        with pytest.raises(KeyError, match="undelivered, got 1"):
            ring.get(1)
        assert ring.flush() == [(0, {"x": 0.0})]


def test_latest(device: torch.device) -> None:
    with AsyncScalars(device, ["x"], depth=2) as ring:
        assert ring.latest is None
        ring.put(0, {"x": 1})
        ring.put(1, {"x": 2})
        assert ring.get(1) == {"x": 2.0}
        assert ring.latest == (1, {"x": 2.0}), "delivered or not"
        assert ring.poll() == [(0, {"x": 1.0})]


def test_flush_is_idempotent_and_close_keeps_what_was_not_read(device: torch.device) -> None:
    ring = AsyncScalars(device, ["x"])
    ring.put(0, {"x": 1})
    assert ring.flush() == [(0, {"x": 1.0})]
    assert ring.flush() == []
    ring.put(1, {"x": 2})
    ring.close()
    ring.close()
    assert ring.poll() == [(1, {"x": 2.0})]
    assert ring.flush() == []
    with pytest.raises(RuntimeError, match="expected an open ring"):
        ring.put(2, {"x": 3})


@pytest.mark.waits_often
@pytest.mark.parametrize("on_full", ["wait", "drop_oldest", "error"])
@pytest.mark.parametrize("depth", [1, 2, 7])
def test_nothing_is_lost_or_reordered(depth: int, on_full: Any, rng: torch.Generator, device: torch.device) -> None:
    """10 000 puts with random pauses and polls."""
    draw = random.Random(int(torch.randint(2**31, (), generator=rng)))
    value = torch.zeros((), dtype=torch.int64, device=device)
    got: list[tuple[Any, dict[str, Any]]] = []
    with AsyncScalars(device, {"n": torch.int64, "f": torch.float64}, depth=depth, on_full=on_full) as ring:
        for step in range(10_000):
            value.add_(3)
            if on_full != "wait":
                got += ring.flush()
            ring.put(step, {"n": value, "f": value})
            if draw.random() < 0.05:
                got += ring.poll()
            if draw.random() < 0.001:
                time.sleep(draw.random() * 1e-3)
    got += ring.poll()
    assert ring.dropped == 0
    assert got == [(step, {"n": 3 * step + 3, "f": 3.0 * step + 3}) for step in range(10_000)]


def test_two_threads(device: torch.device) -> None:
    """One puts, one polls."""
    got: list[Any] = []
    done = threading.Event()
    with AsyncScalars(device, ["x"], depth=3) as ring:

        def read() -> None:
            while not done.is_set():
                got.extend(ring.poll())

        reader = threading.Thread(target=read)
        reader.start()
        for step in range(2000):
            ring.put(step, {"x": step})
        done.set()
        reader.join()
    got += ring.poll()
    assert got == [(step, {"x": float(step)}) for step in range(2000)]


def test_resume_from_a_flushed_ring(device: torch.device) -> None:
    """Nothing of a ring belongs into a checkpoint: after a flush, a new one goes on."""
    logged = []
    for start in (0, 5):
        with AsyncScalars(device, ["x"]) as ring:
            for step in range(start, start + 5):
                ring.put(step, {"x": torch.tensor(float(step), device=device)})
                logged += ring.poll()
            logged += ring.flush()
    assert logged == [(step, {"x": float(step)}) for step in range(10)]


# --------------------------------------------------------------------------------------------------- a device that lags


def test_poll_sees_only_what_has_arrived(late: Callable[[], None]) -> None:
    ring = AsyncScalars("cpu", ["x"], depth=3)
    for step in range(3):
        ring.put(step, {"x": torch.tensor(float(step))})
    assert ring.poll() == []
    assert ring.latest is None
    late()
    late()
    assert ring.poll() == [(0, {"x": 0.0}), (1, {"x": 1.0})]
    late()
    assert ring.latest == (2, {"x": 2.0})
    assert ring.flush() == [(2, {"x": 2.0})]


def test_get_times_out_and_can_be_asked_again(late: Callable[[], None]) -> None:
    ring = AsyncScalars("cpu", ["x"])
    ring.put("a", {"x": torch.tensor(1.0)})
    with pytest.raises(TimeoutError, match=r"'a' did not arrive within 0.01 s"):
        ring.get("a", timeout=0.01)
    timer = after(0.05, late)
    assert ring.get("a") == {"x": 1.0}
    timer.join()


def test_a_full_ring_waits(late: Callable[[], None]) -> None:
    ring = AsyncScalars("cpu", ["x"], depth=2)
    ring.put(0, {"x": torch.tensor(0.0)})
    ring.put(1, {"x": torch.tensor(1.0)})
    arrived_at: list[float] = []

    def arrive() -> None:
        arrived_at.append(time.monotonic())
        late()

    timer = after(0.1, arrive)
    ring.put(2, {"x": torch.tensor(2.0)})
    assert arrived_at, "the third put came back before the first had arrived"
    assert arrived_at[0] <= time.monotonic()
    timer.join()
    late()
    late()
    assert ring.flush() == [(step, {"x": float(step)}) for step in range(3)]


def test_a_full_ring_raises(late: Callable[[], None]) -> None:
    ring = AsyncScalars("cpu", ["x"], depth=2, on_full="error")
    ring.put(0, {"x": 0})
    ring.put(1, {"x": 1})
    with pytest.raises(RuntimeError, match="fewer than depth=2 puts on their way, got 2"):
        ring.put(2, {"x": 2})
    late()
    ring.put(2, {"x": 2})
    late()
    late()
    assert [tag for tag, _ in ring.flush()] == [0, 1, 2]


def test_a_full_ring_drops_the_oldest(late: Callable[[], None]) -> None:
    ring = AsyncScalars("cpu", ["x"], depth=2, on_full="drop_oldest")
    for step in range(5):
        ring.put(step, {"x": torch.tensor(float(step))})
    assert ring.dropped == 3
    for _ in range(5):
        late()
    assert ring.flush() == [(3, {"x": 3.0}), (4, {"x": 4.0})]


def test_drop_oldest_keeps_the_newest_arrived_or_not(device: torch.device) -> None:
    with AsyncScalars(device, ["x"], depth=3, on_full="drop_oldest") as ring:
        for step in range(10):
            ring.put(step, {"x": step})
    assert ring.poll() == [(step, {"x": float(step)}) for step in (7, 8, 9)]
    assert ring.dropped == 7


def test_an_exception_is_not_masked(late: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scalars, "_EXCEPTION_TIMEOUT", 0.02)
    ring = AsyncScalars("cpu", ["x"])

    def train() -> None:
        with ring:
            ring.put(0, {"x": 1})
            late()
            ring.put(1, {"x": 2})  # never arrives
            raise ZeroDivisionError

    with pytest.warns(UserWarning, match="1 puts still on their way"):
        raises(ZeroDivisionError, train)
    assert ring.poll() == [(0, {"x": 1.0})], "what had arrived is there"


def test_an_error_of_the_device_does_not_mask_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> bool:
        raise RuntimeError("the device is lost")

    def train() -> None:
        with AsyncScalars("cpu", ["x"]) as ring:
            ring.put(0, {"x": 1})
            raise ZeroDivisionError

    monkeypatch.setattr(Lane, "publish", lambda *_args, **_options: None)
    monkeypatch.setattr(scalars, "wait_until", broken)
    with pytest.warns(UserWarning, match="the device is lost"):
        raises(ZeroDivisionError, train)
    ring = AsyncScalars("cpu", ["x"])
    ring.put(0, {"x": 1})
    with pytest.raises(RuntimeError, match="the device is lost"):
        ring.close()
    ring.close()
    ring = AsyncScalars("cpu", ["x"])
    ring.put(0, {"x": 1})
    with pytest.raises(RuntimeError, match="the device is lost"):
        ring.flush()


def test_early_stop(device: torch.device) -> None:
    with AsyncScalars(device, ["x"], depth=4) as ring:
        for step in range(100):
            ring.put(step, {"x": torch.tensor(float(step), device=device)})
            if step == 6:
                break
    assert [tag for tag, _ in ring.poll()] == list(range(7))


def test_waiting_for_what_never_comes() -> None:
    class Idle:
        def query(self) -> bool:
            return True

    with pytest.raises(RuntimeError, match="never arrived, though their stream has finished"):
        wait_until(lambda: False, Idle(), None)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- forks and life spans


def read_in_child(ring: AsyncScalars, results: Any) -> None:
    results.put(ring.poll())
    ring.close()


def test_a_forked_child_delivers_what_was_read_before() -> None:
    ring = AsyncScalars("cpu", ["x"])
    ring.put(0, {"x": 1})
    assert ring.latest is not None
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=read_in_child, args=(ring, results))
    child.start()
    assert results.get(timeout=60) == [(0, {"x": 1.0})]
    child.join()
    assert child.exitcode == 0


def test_a_foreign_process_does_not_touch_mapped_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = AsyncScalars("cpu", ["x"])
    ring.put(0, {"x": 1})
    monkeypatch.setattr(Lane, "is_own", False)
    monkeypatch.setattr(Lane, "end", None)
    monkeypatch.setattr(Lane, "read", None)
    assert ring.poll() == []
    assert ring.latest is None
    assert ring.flush() == []
    ring.close()


def test_rings_leave_nothing_behind(device: torch.device) -> None:
    for _ in range(3):
        with AsyncScalars(device, ["x"]) as ring:
            ring.put(0, {"x": 1})
        del ring
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is AsyncScalars]


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("meta", ["x"]), {}, ValueError, "device must be a CPU or CUDA device, got meta"),
        (("cpu", []), {}, ValueError, "names must be unique, at least one"),
        (("cpu", ["x", "y", "x"]), {}, ValueError, "names must be unique"),
        (("cpu", "loss"), {}, TypeError, "names must be a sequence or a mapping of strings, got 'loss'"),
        (("cpu", [1]), {}, TypeError, "names must be strings, got 1"),
        (("cpu", {"x": torch.float32}), {}, ValueError, "x must be torch.float64 or torch.int64, got torch.float32"),
        (("cpu", ["x"]), {"depth": 0}, ValueError, "depth must be at least 1, got 0"),
        (("cpu", ["x"]), {"on_full": "block"}, ValueError, "on_full must be 'wait', 'drop_oldest' or 'error'"),
    ],
)
def test_errors_at_construction(arguments: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"syncfree_ext.AsyncScalars: {message}"):
        AsyncScalars(*arguments, **options)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"y": 1}, KeyError, "expected names of"),
        ({"x": torch.ones(2)}, ValueError, r"x must have one element, got shape \(2,\)"),
        ({"x": torch.ones(0)}, ValueError, r"x must have one element, got shape \(0,\)"),
        ({"x": torch.ones((), dtype=torch.complex64)}, TypeError, "x must be real, got torch.complex64"),
        ({"x": torch.ones((), dtype=torch.uint16)}, TypeError, "x must be neither float8 nor unsigned .* torch.uint16"),
        ({"n": torch.ones((), dtype=torch.uint64)}, TypeError, "n must be neither float8 nor unsigned beyond uint8"),
        ({"x": torch.ones((), dtype=torch.float8_e5m2)}, TypeError, "x must be neither float8 nor unsigned"),
        ({"n": Fraction(1, 2)}, TypeError, "n is an int64 name and must be an integer"),
        ({"x": torch.ones((), device="meta")}, ValueError, "x must be on cpu or the CPU, got meta"),
        ({"x": "1"}, TypeError, "x must be a number or a tensor with one element, got str"),
        ({"n": 1.0}, TypeError, "n is an int64 name and must be an integer, got 1.0"),
        ({"n": torch.ones(())}, TypeError, "n is an int64 name and must be an integer, got torch.float32"),
        ({"n": 2**63}, ValueError, "n must fit into int64"),
    ],
)
def test_errors_of_put(values: dict[str, Any], error: type[Exception], message: str) -> None:
    with AsyncScalars("cpu", {"x": torch.float64, "n": torch.int64}) as ring:
        with pytest.raises(error, match=message):
            ring.put(0, values)
        ring.put(1, {"x": 2.0})
        assert ring.flush() == [(1, {"x": 2.0})], "a refused put leaves no trace"


# -------------------------------------------------------------------------------------------- replays, without a device


def replay(ring: AsyncScalars, monkeypatch: pytest.MonkeyPatch, tag: Any, values: dict[str, Any]) -> Callable[[], None]:
    """A captured put, and what a replay of it would do."""
    calls: list[Callable[[], None]] = []
    publish = Lane.publish

    def record(self: Lane, *args: Any, **options: Any) -> None:
        calls.append(lambda: publish(self, *args, **options))

    with monkeypatch.context() as patch:
        patch.setattr(Lane, "stream", lambda _self: None)
        patch.setattr(Lane, "publish", record)
        ring.put(tag, values)
    return calls[0]


def test_replays_are_numbered_and_mixed_with_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    ring = AsyncScalars("cpu", {"x": torch.float64, "n": torch.int64}, depth=3)
    x = torch.zeros(())
    one, two = (replay(ring, monkeypatch, tag, {"x": x, "n": 5}) for tag in ("one", None))
    assert ring.poll() == []
    for run in (one, two, one):
        x.add_(1)
        run()
    ring.put("eager", {"x": 9})
    got = ring.poll()
    assert got.pop([tag for tag, _ in got].index("eager")) == ("eager", {"x": 9.0})
    assert got == [
        (("one", 0), {"x": 1.0, "n": 5}),
        ((None, 0), {"x": 2.0, "n": 5}),
        (("one", 1), {"x": 3.0, "n": 5}),
    ]
    one()
    assert ring.get(("one", 2)) == {"x": 3.0, "n": 5}
    assert ring.flush() == []
    assert ring.dropped == 0
    ring.close()


@pytest.mark.parametrize("runs", [1, 4, 5, 8, 9, 100])
def test_overwritten_replays_are_counted(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = AsyncScalars("cpu", ["x"], depth=4)
    x = torch.zeros(())
    run = replay(ring, monkeypatch, "t", {"x": x})
    for _ in range(3):
        for _ in range(runs):
            x.add_(1)
            run()
        got = ring.poll()
        last = int(x)
        kept = min(runs, 4)
        assert got == [(("t", n), {"x": n + 1.0}) for n in range(last - kept, last)]
    assert ring.dropped == 3 * max(0, runs - 4)


def test_a_replay_that_is_being_overwritten_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = AsyncScalars("cpu", ["x"], depth=2)
    run = replay(ring, monkeypatch, "t", {"x": torch.ones(())})
    run()
    run()
    ring._replays.host[0, 1] = 3  # the third has begun in the row of the first
    assert [tag for tag, _ in ring.poll()] == [("t", 1)]
    assert ring.dropped == 1
    run()
    assert [tag for tag, _ in ring.poll()] == [("t", 2)]


def test_captured_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    with AsyncScalars("cpu", ["x"]) as ring:
        run = replay(ring, monkeypatch, "t", {"x": torch.ones(())})
        replays = ring._replays
    del ring
    assert any(entry[0] is replays for entry in scalars._captured_memory)
    run()  # a late replay writes to memory that is still there


def test_capture_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scalars, "_MAX_CAPTURED", 2)
    ring = AsyncScalars("cpu", ["x"])
    replay(ring, monkeypatch, 0, {"x": 1})
    replay(ring, monkeypatch, 0, {"x": 1})
    with pytest.raises(RuntimeError, match="at most 2 captured puts"):
        replay(ring, monkeypatch, 0, {"x": 1})
    monkeypatch.setattr(scalars, "is_capturing", lambda _device: True)
    with pytest.raises(RuntimeError, match="outside the capture of a CUDA graph"):
        ring.flush()
    with pytest.raises(RuntimeError, match="made before the capture"):
        AsyncScalars("cpu", ["x"])


def test_leaving_the_ring_checks_its_guards(device: torch.device) -> None:
    def train() -> None:
        with AsyncScalars(device, ["x"], depth=4) as ring:
            guard = NonFiniteGuard(ring)
            for step in range(3):
                guard.update(step, torch.tensor(torch.nan if step == 1 else 0.0, device=device))

    with pytest.raises(NonFiniteError, match="in step 1"):
        train()
