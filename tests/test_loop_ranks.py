"""Metrics and guards over two ranks: one process each, gloo on the CPU, NCCL where there are two GPUs."""

from __future__ import annotations

import functools
import math
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from syncfree_ext import AsyncScalars, MetricBuffer, NonFiniteError, NonFiniteGuard

KINDS = {"s": "sum", "m": "mean", "l": "last", "lo": "min", "hi": "max", "r": "ratio"}


def rank_main(rank: int, folder: str, backend: str) -> None:
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=2, store=dist.FileStore(f"{folder}/store", 2))
    results: dict[str, Any] = {}
    for name, body in BODIES.items():
        try:
            results[name] = body(rank, device)
        except BaseException:
            results[name] = traceback.format_exc()
    torch.save(results, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


@functools.cache
def both_ranks(backend: str) -> list[dict[str, Any]]:
    """What each body returned, on each rank. One pair of processes runs them all: starting it is what takes long."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(folder, backend), nprocs=2)
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(2)]


def on_two_ranks(name: str, backend: str) -> list[Any]:
    results = [rank[name] for rank in both_ranks(backend)]
    for result in results:
        assert not isinstance(result, str), result
    return results


BACKENDS = pytest.mark.parametrize(
    "backend",
    [
        "gloo",
        pytest.param(
            "nccl",
            marks=[pytest.mark.cuda, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")],
        ),
    ],
)


def metrics_body(rank: int, device: torch.device) -> list[dict[str, float]]:
    results = []
    # Names come in another order on each rank.
    names = KINDS if rank == 0 else dict(reversed(KINDS.items()))
    buffer = MetricBuffer(device, names, group=dist.group.WORLD)
    for interval in range(3):
        for i in range(2 + rank):
            x = torch.tensor(10.0 * interval + 3 * rank + i, device=device)
            metrics = {name: (x, rank + 1) if kind == "ratio" else x for name, kind in KINDS.items()}
            if interval == 1 and rank == 1:
                del metrics["l"], metrics["lo"]  # this rank has none
            if interval == 2:
                metrics["hi"] = math.nan if rank == 1 and i == 0 else 1.0
            buffer.add(**metrics)
        if interval < 2:
            results.append(buffer.compute())
        else:
            with AsyncScalars(device, sorted(KINDS)) as ring:
                buffer.compute_async(ring, "tag")
                results.append(ring.get("tag"))
    results.append(buffer.compute())
    try:
        buffer.add(new=1)
    except ValueError as error:
        assert "agreed on the names" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a new name was accepted")
    return results


@BACKENDS
def test_metrics_over_ranks(backend: str) -> None:
    first, second = on_two_ranks("metrics", backend)
    assert str(first) == str(second), "every rank has the same result"
    for interval in range(3):
        values = [[10.0 * interval + 3 * rank + i for i in range(2 + rank)] for rank in range(2)]
        both = values[0] + values[1]
        expected = {
            "s": sum(both),
            "m": sum(both) / 5,
            "l": values[0][-1] if interval == 1 else (values[0][-1] + values[1][-1]) / 2,
            "lo": min(both),
            "hi": math.nan if interval == 2 else max(both),
            "r": sum(both) / (2 * 1 + 3 * 2),
        }
        assert first[interval] == pytest.approx(expected, nan_ok=True, rel=1e-14)
    empty = first[3]
    assert empty.pop("s") == 0.0
    assert all(math.isnan(value) for value in empty.values())


def disagreeing_body(rank: int, device: torch.device) -> list[str]:
    buffer = MetricBuffer(device, {"a": "sum"}, group=dist.group.WORLD)
    buffer.add(a=1, **({"b": 2} if rank else {}))
    with pytest.raises(ValueError, match="same names and reductions on every rank") as caught:
        buffer.compute()
    return [str(caught.value)]


@BACKENDS
def test_ranks_that_disagree_on_names_all_raise(backend: str) -> None:
    first, second = on_two_ranks("disagreeing", backend)
    assert first == second
    assert "('b', 'mean')" in first[0]


GUARDS = [(depth, bad_rank) for depth in (1, 3) for bad_rank in (0, 1)]


def guard_body(rank: int, device: torch.device, depth: int, bad_rank: int) -> list[int]:
    guard = NonFiniteGuard(AsyncScalars(device, ["x"], depth=depth), group=dist.group.WORLD)
    for step in range(20):
        value = torch.tensor([1.0, math.nan if (rank, step) == (bad_rank, 4) else 2.0], device=device)
        try:
            guard.update(step, value)
        except NonFiniteError as error:
            return [step, error.step, error.count]
    return []


@BACKENDS
@pytest.mark.parametrize(("depth", "bad_rank"), GUARDS)
def test_every_rank_raises_at_the_same_update(depth: int, bad_rank: int, backend: str) -> None:
    assert on_two_ranks(f"guard {depth} {bad_rank}", backend) == [[4 + depth, 4, 1]] * 2


def check_body(rank: int, device: torch.device) -> list[int]:
    guard = NonFiniteGuard(AsyncScalars(device, ["x"], depth=4), group=dist.group.WORLD)
    for step in range(3):
        guard.update(step, math.inf if (rank, step) == (1, 1) else 0.0)
    with pytest.raises(NonFiniteError) as caught:
        guard.check()
    return [caught.value.step]


@BACKENDS
def test_check_on_every_rank(backend: str) -> None:
    assert on_two_ranks("check", backend) == [[1], [1]]


BODIES: dict[str, Callable[[int, torch.device], Any]] = {
    "metrics": metrics_body,
    "disagreeing": disagreeing_body,
    "check": check_body,
    **{f"guard {d} {r}": functools.partial(guard_body, depth=d, bad_rank=r) for d, r in GUARDS},
}
