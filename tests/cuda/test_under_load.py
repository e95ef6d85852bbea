"""Quick variants of what tools/soak.py does to a GPU: memory that runs out, work in flight at the end, leaks."""

from __future__ import annotations

import contextlib

import pytest
import torch

import soak_parts
import syncfree_ext

pytestmark = pytest.mark.cuda


def test_running_out_of_memory_leaves_nothing_behind(device: torch.device) -> None:
    numbers = soak_parts.out_of_memory(device, budgets=12)
    assert numbers["ran_out"] >= numbers["calls"] // 2


def test_memory_kept_by_a_failed_call_is_seen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    right = soak_parts.Problem.run

    def keeping(self: soak_parts.Problem) -> list[torch.Tensor]:
        try:
            return right(self)
        except torch.OutOfMemoryError:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
            kept.append(torch.ones(1000, device=device))
            raise

    monkeypatch.setattr(soak_parts.Problem, "run", keeping)
    with pytest.raises(AssertionError, match="were kept by a call"):
        soak_parts.out_of_memory(device, budgets=4)


def everything(device: torch.device) -> list[torch.Tensor]:
    """All memory that torch may still take and all that it has taken and keeps for later, down to its smallest block.

    What earlier tests left of blocks that they still use part of is not given back, and would be enough for a call.
    """
    taken = []
    for power in range(30, 8, -1):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(2**power, dtype=torch.uint8, device=device))
    return taken


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_error_is_that_of_torch(reduction: str, device: torch.device) -> None:
    """Trainers look for torch.OutOfMemoryError, or for "out of memory" in the text, to try a smaller batch."""
    x = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.ones(2**20, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(64, dtype=torch.int64, device=device)
    total = torch.cuda.get_device_properties(device).total_memory
    loss = syncfree_ext.linear_cross_entropy(x, w, target, reduction=reduction)
    del loss
    soak_parts._freed(device)
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + 2**22) / total, device)
        taken = everything(device)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            syncfree_ext.linear_cross_entropy(x, w, target, reduction=reduction)
        with torch.inference_mode(), pytest.raises(RuntimeError, match=r"CUDA out of memory\."):
            syncfree_ext.linear_cross_entropy(x, w, target, reduction=reduction)
        del taken
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    syncfree_ext.linear_cross_entropy(x, w, target, reduction=reduction).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_threads_on_streams(device: torch.device) -> None:
    assert soak_parts.threads(device, 3.0)["calls"] >= 8


def test_two_models_on_streams(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """More steps than the quick test on both devices takes."""
    soak_parts.two_models(device, 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(soak_parts.EXITS))
def test_exit_with_work_in_flight(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_parts, "EXITS", {name: soak_parts.EXITS[name]})
    soak_parts.exits(device, 1)


def test_no_leaks_over_many_calls(device: torch.device) -> None:
    soak_parts.leaks(device, 600)
