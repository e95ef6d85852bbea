"""The loop's parts on a GPU: no waits, arrival behind other work, streams, errors of the device, two devices."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_sync import CYCLES, no_sync, returns_before, sleep
from torch import Tensor, nn

from syncfree_ext import AsyncScalars, MetricBuffer, NonFiniteGuard, ResidentCache, pin_buffers
from syncfree_ext import masked_indices as select

pytestmark = pytest.mark.cuda

KINDS = {"s": "sum", "m": "mean", "l": "last", "lo": "min", "hi": "max", "r": "ratio"}


class Step:
    """Every part once, on tensors that exist already."""

    def __init__(self) -> None:
        self.x = torch.rand(3, 500, device="cuda")
        self.loss = torch.ones((), device="cuda", requires_grad=True) * 2
        self.half = torch.ones((), device="cuda", dtype=torch.bfloat16)
        self.count = torch.tensor(7, device="cuda")
        self.mask = torch.rand(4, 3000, device="cuda") < 0.3
        self.ids = torch.arange(4, device="cuda")
        self.limit = torch.tensor([1, 0, 50, 9], device="cuda")
        self.scores = torch.rand(4, 3000, device="cuda", dtype=torch.float64)
        self.generator = torch.Generator("cuda").manual_seed(1)
        names = {**dict.fromkeys(["loss", "half", "lr", *KINDS], torch.float64), "count": torch.int64}
        self.ring = AsyncScalars("cuda", names, depth=64)
        self.guard = NonFiniteGuard(self.ring)
        self.metrics = MetricBuffer("cuda", KINDS)
        self.step = 0
        self.cache = ResidentCache(lambda x: x * 2, "cuda")
        self.constant = torch.ones(3)
        self.bn = nn.BatchNorm1d(3, affine=False)
        self.pin = pin_buffers(self.bn, lambda _name, _tensor: True, "cuda")

    def put(self) -> None:
        self.step += 1
        self.ring.put(
            self.step, {"loss": self.loss, "half": self.half, "lr": 0.1, "count": self.count, "s": torch.ones(1)}
        )
        self.ring.poll()
        _ = self.ring.latest

    def update(self) -> None:
        self.step += 1
        self.guard.update(self.step, self.loss, self.x, self.half, self.count, 1.0)
        self.guard.poll()

    def add(self) -> None:
        self.metrics.add(s=self.loss, m=self.half, l=self.count, lo=1.0, hi=self.x[0, :1], r=(self.loss, 3))
        self.metrics.add(s=1.0, l=4, r=(1, self.count))

    def compute(self) -> None:
        self.step += 1
        self.metrics.compute_async(self.ring, self.step)
        self.metrics.state_dict()

    def select(self) -> list[Tensor]:
        outputs = [
            *select(self.mask, 100),
            *select(self.mask, 100, order="random", generator=self.generator, limit=self.limit),
            *select(self.mask.T, 7, order="random", scores=self.scores.T),
            *select(self.mask, 100, order="random", seed=3, row_ids=self.ids, limit=20),
        ]
        rule = (self.mask.sum(-1).max() - 1).clamp(1, 100)
        return [*outputs, *select(self.mask, 100, order="random", limit=rule)]

    def move(self) -> None:
        self.bn.cpu()
        self.bn.cuda()
        self.bn.to("cpu", torch.float16).float()
        self.cache(self.constant)


PARTS = ["put", "update", "add", "compute", "select", "move"]


@pytest.mark.parametrize("part", PARTS)
def test_under_the_checker(part: str) -> None:
    step = Step()
    run = getattr(step, part)
    run()
    with no_sync():
        for _ in range(3):
            run()


@pytest.mark.parametrize("where", ["same stream", "side stream"])
@pytest.mark.parametrize("part", PARTS)
def test_returns_before_a_backlog(part: str, where: str) -> None:
    step = Step()
    stream = torch.cuda.current_stream() if where == "same stream" else torch.cuda.Stream()
    returns_before(stream, sleep, getattr(step, part))


@pytest.fixture
def bulk_copy() -> Callable[[], tuple[torch.cuda.Event, torch.cuda.Event]]:
    """Queues a copy of 2 GiB to the host on a stream of its own; it takes some 40 ms. Events of its begin and end."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(2**31, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream()

    def copy() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = torch.cuda.Event(), torch.cuda.Event()
        with torch.cuda.stream(stream):
            begin.record()
            pinned.copy_(source, non_blocking=True)
            end.record()
        return begin, end

    return copy


def test_values_pass_a_bulk_copy(bulk_copy: Callable[[], tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
    """They arrive while the copy engine is busy, and the stream they come from does not wait for it either.

    Where other processes use the GPU, its time slices can hold the kernels back until a copy has ended, so there are
    several attempts, of which one has to succeed. Values that take the copy engine succeed in none: they are queued
    when the copy has begun, and come behind it.
    """
    ring = AsyncScalars("cuda", ["x"], depth=8)
    x = torch.zeros((), device="cuda")
    ring.put(-1, {"x": x})
    ring.flush()
    for attempt in range(20):
        torch.cuda.synchronize()
        x.zero_()
        begins, copied = bulk_copy()
        begins.synchronize()
        for step in range(5):
            ring.put(step, {"x": x.add_(1)})
        after = torch.cuda.Event()
        after.record()
        assert ring.get(4) == {"x": 5.0}
        after.synchronize()
        if not copied.query():
            break
        time.sleep(0.02 * attempt)
    else:
        pytest.fail("the values came only after the copy, each time")
    torch.cuda.synchronize()


def test_poll_sees_nothing_early() -> None:
    ring = AsyncScalars("cuda", ["x"], depth=4)
    x = torch.zeros((), device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    ring.put(0, {"x": x + 1})
    ring.put(1, {"x": x + 2})
    assert ring.poll() == []
    assert ring.latest is None
    with pytest.raises(TimeoutError):
        ring.get(0, timeout=0.01)
    assert ring.flush() == [(0, {"x": 1.0}), (1, {"x": 2.0})]


def test_a_full_ring_waits_for_the_oldest_only() -> None:
    ring = AsyncScalars("cuda", ["x"], depth=2)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES // 4)
    first = torch.cuda.Event()
    ring.put(0, {"x": 0})
    first.record()
    torch.cuda._sleep(CYCLES)
    ring.put(1, {"x": 1})
    second = torch.cuda.Event()
    second.record()
    assert not first.query()
    ring.put(2, {"x": 2})
    assert not second.query(), "it waited for more than the oldest"
    assert ring.poll() == [(0, {"x": 0.0})]
    assert [tag for tag, _ in ring.flush()] == [1, 2]


def test_nothing_is_lost_behind_random_delays(rng: torch.Generator) -> None:
    draw = random.Random(int(torch.randint(2**31, (), generator=rng)))
    value = torch.zeros((), dtype=torch.int64, device="cuda")
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for depth in (1, 3):
        got: list[Any] = []
        with AsyncScalars("cuda", {"n": torch.int64, "f": torch.float64}, depth=depth) as ring:
            for step in range(10_000):
                other = streams[draw.random() < 0.01]
                other.wait_stream(streams[0])
                with torch.cuda.stream(other):
                    if draw.random() < 0.05:
                        torch.cuda._sleep(draw.randrange(200_000))
                    value.add_(1)
                    ring.put(step, {"n": value, "f": value})
                streams[0].wait_stream(other)
                if draw.random() < 0.2:
                    got += ring.poll()
        got += ring.poll()
        assert [tag for tag, _ in got] == list(range(10_000))
        assert len({values["n"] - tag for tag, values in got}) == 1
        assert all(values["n"] == values["f"] for _, values in got)
        value.zero_()


def test_drop_oldest_over_streams() -> None:
    """A put on another stream does not overtake the kernel whose row it takes."""
    x, side = torch.zeros((), device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    ring = AsyncScalars("cuda", ["x"], depth=1, on_full="drop_oldest")
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES // 4)
        ring.put("late", {"x": x})
    ring.put("new", {"x": x + 1})
    assert ring.flush() == [("new", {"x": 1.0})]
    assert ring.dropped == 1


def test_the_memory_of_a_closed_ring_is_used_again() -> None:
    names = [f"n{i}" for i in range(29)]
    places = set()
    for _ in range(5):
        with AsyncScalars("cuda", names, depth=3) as ring:
            ring.put(0, {"n0": 1})
            assert ring.get(0) == {"n0": 1.0}
            assert ring.poll() == [], "nothing of its former life is seen"
            assert not ring._replays.host.any()
            places |= {ring._lane.host.data_ptr(), ring._replays.host.data_ptr()}
    assert len(places) == 2


def test_mapped_slots() -> None:
    host, slots = torch.ops.syncfree.mapped_slots(torch.empty(0, device="cuda"), 3, 6)
    assert (host.device.type, slots.device, host.shape, slots.shape) == (
        "cpu", torch.device("cuda", 0), (3, 6), (3, 6))  # fmt: skip
    assert not host.any()
    slots.fill_(5)
    torch.cuda.synchronize()
    assert bool((host == 5).all())
    with pytest.raises(ValueError, match="expected rows >= 1 and width >= 4, got 0 and 6"):
        torch.ops.syncfree.mapped_slots(slots, 0, 6)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_publish_in_a_compiled_function(mode: str) -> None:
    """The mapped memory is a CUDA tensor there. torch.compile needs triton for it."""
    pytest.importorskip("triton")
    host, slots = torch.ops.syncfree.mapped_slots(torch.empty(0, device="cuda"), 4, 5)
    counters = torch.zeros(2, dtype=torch.int64, device="cuda")

    def run(x: Tensor) -> Tensor:
        y = x.square().sum()
        torch.ops.syncfree.publish_(slots, [y], [0], [], first_integer_column=1, counters=counters)
        return y + 1

    compiled = torch.compile(run, mode=mode, fullgraph=True)
    for i in range(1, 7):
        out = compiled(torch.full((8,), float(i), device="cuda"))
        torch.cuda.synchronize()
        assert float(out) == 8.0 * i * i + 1
        row = torch.ops.syncfree.read_slot(host, i)
        assert row[:2].tolist() == [i, i]
        assert row[4:].view(torch.float64).tolist() == [8.0 * i * i]


FAILING = """
import torch
import syncfree_ext as sf

ring = sf.AsyncScalars("cuda", ["x"], depth=4)
ring.put(0, {"x": torch.ones((), device="cuda")})
ring.get(0)
ring.put(1, {"x": torch.ones((), device="cuda")})
torch.cuda.synchronize()
index = torch.tensor([10**6], device="cuda")
broken = torch.zeros(4, device="cuda")[index]  # a device-side assertion
"""


def outcome(body: str) -> str:
    """What a process prints whose device has failed."""
    script = FAILING + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    return done.stdout + done.stderr.splitlines()[-1] if done.stderr else done.stdout


def test_flush_surfaces_an_error_of_the_device() -> None:
    body = """
    for call in (lambda: ring.put(2, {"x": broken}), ring.flush, ring.close):
        try:
            call()
        except RuntimeError as error:
            print("raised", type(error).__name__)
    print("polled", ring.poll())
    import os
    os._exit(0)
    """
    out = outcome(body)
    assert "raised" in out
    assert "polled [(1, {'x': 1.0})" in out, "what had arrived is still there"


def test_an_exception_is_not_masked_by_an_error_of_the_device() -> None:
    body = """
    import os
    try:
        with ring:
            try:
                ring.put(2, {"x": broken})
            except RuntimeError:
                pass
            raise ZeroDivisionError
    except ZeroDivisionError:
        print("not masked", flush=True)
    os._exit(0)
    """
    assert "not masked" in outcome(body)


def test_a_forked_child_leaves_mapped_memory_alone() -> None:
    """It delivers what a put of the parent had found before the fork, and not what had only arrived."""
    body = """
    import os, torch, syncfree_ext as sf
    ring = sf.AsyncScalars("cuda", ["x"])
    ring.put("read", {"x": 1})
    torch.cuda.synchronize()
    ring.put("arrived", {"x": 2})
    torch.cuda.synchronize()
    child = os.fork()
    if child == 0:
        assert ring.latest == ("read", {"x": 1.0}), ring.latest
        assert ring.poll() == [("read", {"x": 1.0})]
        assert ring.poll() == [] and ring.flush() == []
        ring.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert ring.flush() == [("read", {"x": 1.0}), ("arrived", {"x": 2.0})]
    print("fine")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout == "fine\n", done.stderr


def test_an_open_ring_at_the_end_of_the_process() -> None:
    body = """
    import torch, syncfree_ext as sf
    ring = sf.AsyncScalars("cuda", ["x"], depth=8)
    guard = sf.NonFiniteGuard(ring)
    torch.cuda._sleep(10**8)
    ring.put(0, {"x": torch.ones((), device="cuda")})
    guard.update(0, torch.ones((), device="cuda"))
    print("fine")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)], capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_another_device_is_refused() -> None:
    with AsyncScalars("cpu", ["x"]) as ring, pytest.raises(ValueError, match="x must be on cpu or the CPU, got cuda:0"):
        ring.put(0, {"x": torch.ones((), device="cuda")})
    buffer = MetricBuffer("cpu")
    with pytest.raises(ValueError, match="x must be on cpu or the CPU, got cuda:0"):
        buffer.add(x=torch.ones((), device="cuda"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices() -> None:
    """One object for each, whatever device is current."""
    for current in (0, 1):
        with torch.cuda.device(current):
            for index in (0, 1):
                x = torch.full((), 3.0 + index, device=f"cuda:{index}")
                buffer = MetricBuffer(f"cuda:{index}", KINDS)
                buffer.add(s=x, hi=x)
                mask = torch.ones(2, 9, dtype=torch.bool, device=f"cuda:{index}")
                assert select(mask, 3).indices.device.index == index
                with AsyncScalars(f"cuda:{index}", ["x", *KINDS]) as ring:
                    guard = NonFiniteGuard(ring)
                    for step in range(5):
                        ring.put(step, {"x": x})
                        guard.update(step, x)
                        assert ring.get(step) == {"x": 3.0 + index}
                    buffer.compute_async(ring, "m")
                    assert ring.get("m")["hi"] == 3.0 + index
                    other = torch.ones((), device=f"cuda:{1 - index}")
                    with pytest.raises(ValueError, match=f"x must be on cuda:{index} or the CPU, got"):
                        ring.put(9, {"x": other})
                    with pytest.raises(ValueError, match="must be on the device"):
                        guard.update(9, other)


# ----------------------------------------------------------------------------------------------------- resident buffers


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 1)
        self.bn = nn.BatchNorm1d(3)


def test_pinned_buffers_stay_on_the_device() -> None:
    vae = Vae()
    vae.bn.running_mean.copy_(torch.tensor([1.0, 2.0, 3.0]))
    with pin_buffers(vae, ["bn.running_mean", "bn.running_var"], "cuda") as handle:
        mean = vae.bn.running_mean
        place = mean.data_ptr()
        for move in (lambda: vae.cuda(), lambda: vae.cpu(), lambda: vae.to("cuda"), lambda: vae.to("cpu")):
            move()
            assert vae.bn.running_mean is mean
            assert mean.data_ptr() == place
            assert mean.device == torch.device("cuda", 0)
        assert vae.bn.num_batches_tracked.device.type == "cpu"
        vae.to("cpu", torch.float16)
        assert vae.bn.running_mean.device.type == "cuda"
        assert vae.bn.running_mean.dtype == torch.float16
        vae.float()
        assert vae.bn.running_mean.tolist() == [1.0, 2.0, 3.0]
        assert vae.state_dict()["bn.running_mean"].is_cuda
        vae.load_state_dict(Vae().state_dict())
        assert vae.bn.running_mean.tolist() == [0.0, 0.0, 0.0]
        vae.load_state_dict(Vae().state_dict(), assign=True)
        assert vae.bn.running_mean.is_cuda
        with pytest.raises(ValueError, match="running_mean must not be pinned to another device, got cuda:0"):
            pin_buffers(vae, "bn.running_mean", "cpu")
        handle.remove()
        vae.cpu()
        assert vae.bn.running_mean.device.type == "cpu"


def test_nothing_is_transferred_for_pinned_buffers() -> None:
    bn = nn.BatchNorm1d(1000)
    bn.weight, bn.bias = None, None  # type: ignore[assignment]
    pin_buffers(bn, lambda _name, _tensor: True, "cuda")
    with no_sync():
        for _ in range(3):
            bn.cpu().cuda().to("cpu")


@pytest.mark.parametrize("length", [31, 8192, 8193, 20002, 32768, 32769])
@pytest.mark.parametrize("keys", ["first", "seed", torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_masked_indices_of_any_length(length: int, keys: Any, rng: torch.Generator) -> None:
    """As on the CPU: rows that are kept in registers and rows that are not, whole groups of four and not, few keys."""
    for density, values, offset in ((0.5, 2**24, 0), (0.9, 5, 1), (0.02, 2**24, 4), (1.0, 1, 0)):
        mask = (torch.rand(offset + 3 * length, generator=rng) < density)[offset:].view(3, length)
        scores = torch.randint(values, (offset + 3 * length,), generator=rng).double().div(values).sub(0.5)
        scores[torch.rand(scores.shape, generator=rng) < 0.01] = float("nan")
        options: dict[str, Any] = {}
        if keys == "seed":
            options = {"order": "random", "seed": 3}
        elif keys != "first":
            options = {"order": "random", "scores": scores.to(keys)[offset:].view(3, length)}
        limit = torch.tensor([2, length // 3, length + 5])
        there = {key: moved(value, offset) for key, value in options.items()}
        for size in (1, 512, length + 3):
            got = select(moved(mask, offset), size, limit=limit.cuda(), **there)
            for a, b in zip(got, select(mask, size, limit=limit, **options), strict=True):
                assert torch.equal(a.cpu(), b)


def moved(value: Any, offset: int) -> Any:
    """A tensor on the GPU, which starts offset entries behind an aligned address; all else as it is."""
    if not isinstance(value, Tensor):
        return value
    place = torch.empty(offset + value.numel(), dtype=value.dtype, device="cuda")[offset:].view_as(value)
    return place.copy_(value)


def test_masked_indices_large(rng: torch.Generator) -> None:
    """Rows beyond one tile of the block many times over, and many rows."""
    for rows, length, size in ((1, 3_000_001, 10_000), (5000, 513, 40)):
        mask = (torch.rand(rows, length, generator=rng) < 0.3).cuda()
        keys = torch.rand(rows, length, generator=rng).cuda()
        got = select(mask, size, order="random", scores=keys)
        here = select(mask.cpu(), size, order="random", scores=keys.cpu())
        for a, b in zip(got, here, strict=True):
            assert torch.equal(a.cpu(), b)
        for a, b in zip(select(mask, size), select(mask.cpu(), size), strict=True):
            assert torch.equal(a.cpu(), b)
