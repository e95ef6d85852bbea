"""The loop's parts in CUDA graphs: captured once, replayed with new values."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_sync import CYCLES

from syncfree_ext import AsyncScalars, MetricBuffer, NonFiniteError, NonFiniteGuard
from syncfree_ext import masked_indices as select

pytestmark = pytest.mark.cuda

KINDS = {"s": "sum", "m": "mean", "l": "last", "lo": "min", "hi": "max", "r": "ratio"}


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def test_a_captured_put_replays() -> None:
    x, n = torch.zeros((), device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    with AsyncScalars("cuda", {"x": torch.float64, "n": torch.int64, "lr": torch.float64}, depth=4) as ring:
        graph = captured(lambda: ring.put("step", {"x": x.add_(1), "n": n.add_(2), "lr": 0.5}))
        assert ring.flush() == [("step", {"x": 1.0, "n": 2, "lr": 0.5})], "the warm-up, and not the capture"
        for _ in range(3):
            graph.replay()
        assert ring.flush() == [(("step", i), {"x": 2.0 + i, "n": 4 + 2 * i, "lr": 0.5}) for i in range(3)]
        for _ in range(9):
            graph.replay()
        torch.cuda.synchronize()  # a flush that begins earlier sees what is there before it is overwritten
        got = ring.flush()
        assert [tag for tag, _ in got] == [("step", i) for i in range(8, 12)]
        assert got[-1][1]["x"] == 13.0
        assert ring.dropped == 5
        ring.put("eager", {"x": x})
        assert ring.get("eager") == {"x": 13.0}
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES // 4)
            graph.replay()
        assert ring.poll() == []
        assert [tag for tag, _ in ring.flush()] == [("step", 12)], "flush waits for replays on any stream"


def test_polling_during_replays(rng: torch.Generator) -> None:
    """Rows are overwritten while they are read: what is delivered is whole, and what is lost is counted."""
    x = torch.zeros((), device="cuda")
    names = [f"n{i}" for i in range(40)]
    with AsyncScalars("cuda", names, depth=2) as ring:

        def run() -> None:
            x.add_(1)
            ring.put("t", dict.fromkeys(names, x))

        graph = captured(run)
        ring.flush()
        got = []
        for _ in range(3000):
            graph.replay()
            got += ring.poll()
        got += ring.flush()
    assert len(got) + ring.dropped == 3000
    assert [tag for tag, _ in got] == sorted(tag for tag, _ in got)
    for (_, n), values in got:
        assert set(values.values()) == {n + 2.0}


def test_two_captured_puts() -> None:
    x = torch.zeros((), device="cuda")
    with AsyncScalars("cuda", ["a", "b"], depth=8) as ring:

        def run() -> None:
            ring.put("first", {"a": x.add_(1)})
            ring.put(None, {"b": x.mul_(2)})

        graph = captured(run)
        ring.flush()
        graph.replay()
        graph.replay()
        assert ring.flush() == [
            (("first", 0), {"a": 3.0}),
            ((None, 0), {"b": 6.0}),
            (("first", 1), {"a": 7.0}),
            ((None, 1), {"b": 14.0}),
        ]


def test_a_graph_outlives_its_ring() -> None:
    x = torch.zeros((), device="cuda")

    def graph_of_a_ring() -> torch.cuda.CUDAGraph:
        with AsyncScalars("cuda", ["x"]) as ring:
            return captured(lambda: ring.put(0, {"x": x.add_(1)}))

    graph = graph_of_a_ring()
    gc.collect()
    others = [AsyncScalars("cuda", ["x"]) for _ in range(4)]
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert all(other.poll() == [] for other in others), "no other ring has got that memory"


def test_waiting_under_capture_is_an_error() -> None:
    ring = AsyncScalars("cuda", ["x"])
    ring.put(0, {"x": 1})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = torch.ones((), device="cuda")
        with pytest.raises(RuntimeError, match="outside the capture"):
            ring.flush()
        with pytest.raises(RuntimeError, match="made before the capture"):
            AsyncScalars("cuda", ["x"])
        ring.put(1, {"x": x})
    graph.replay()
    assert [tag for tag, _ in ring.flush()] == [0, (1, 0)]


@pytest.mark.parametrize("depth", [1, 4])
def test_a_guard_in_a_graph(depth: int) -> None:
    x = torch.zeros(5, device="cuda")
    guard = NonFiniteGuard(AsyncScalars("cuda", ["unused"], depth=depth))
    graph = captured(lambda: guard.update(100, x, x[0]))
    for n in range(10):
        x.fill_(float("nan") if n in (6, 8) else 1.0)
        graph.replay()
        if n < 6:
            guard.check()
    with pytest.raises(NonFiniteError) as caught:
        guard.check()
    assert (caught.value.step, caught.value.count) == (106, 2)
    x.zero_()
    guard.reset()
    graph.replay()
    guard.check()


def test_metrics_in_a_graph() -> None:
    x = torch.zeros((), device="cuda")
    buffer = MetricBuffer("cuda", KINDS)

    def run() -> None:
        x.add_(1)
        buffer.add(s=x, m=x, l=x, lo=x, hi=x, r=(x, 2))

    graph = captured(run)
    buffer.reset()
    for _ in range(4):
        graph.replay()
    assert buffer.compute() == {"s": 14.0, "m": 3.5, "l": 5.0, "lo": 2.0, "hi": 5.0, "r": 1.75}
    with pytest.raises(RuntimeError, match="fixed since a CUDA graph captured an add"):
        buffer.add(new=1)


@pytest.mark.parametrize("kind", ["first", "generator", "seed", "scores"])
def test_masked_indices_in_a_graph(kind: str, rng: torch.Generator) -> None:
    mask = torch.zeros(3, 5000, dtype=torch.bool, device="cuda")
    scores, limit = torch.zeros(3, 5000, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
    options: dict[str, Any] = {
        "first": {},
        "generator": {"order": "random"},
        "seed": {"order": "random", "seed": 5},
        "scores": {"order": "random", "scores": scores},
    }[kind]
    select(mask, 64, limit=limit, **options)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = select(mask, 64, limit=limit, **options)
    for density in (0.0, 0.005, 0.4, 1.0):
        mask.copy_(torch.rand(3, 5000, generator=rng) < density)
        scores.copy_(torch.rand(3, 5000, generator=rng))
        limit.copy_(torch.randint(100, (3,), generator=rng))
        graph.replay()
        kept = torch.minimum(mask.sum(-1), limit.clamp(max=64))
        assert torch.equal(got.valid.sum(-1), kept)
        assert torch.equal(got.count, mask.sum(-1))
        assert bool(mask.gather(1, got.indices)[got.valid].all())
        if kind != "generator":
            for a, b in zip(got, select(mask, 64, limit=limit, **options), strict=True):
                assert torch.equal(a, b)
