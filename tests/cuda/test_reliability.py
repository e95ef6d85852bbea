"""Quick variants of what tools/soak.py does to a GPU: memory that runs out, work in flight at the end, leaks."""

from __future__ import annotations

import pytest
import torch

import soak_parts

pytestmark = pytest.mark.cuda


def test_running_out_of_memory_leaves_nothing_behind(device: torch.device) -> None:
    numbers = soak_parts.out_of_memory(device, budgets=12)
    assert numbers["ran_out"] >= len(soak_parts.PROBLEMS)


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
        soak_parts.out_of_memory(device, budgets=12)


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
