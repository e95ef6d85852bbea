"""tools/finder_rounds.py: what differs beyond noise, and how seldom chance does that."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, from the folder of the tools."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parent.parent / "tools")
    return importlib.import_module("finder_rounds")


@pytest.mark.parametrize("noisy", ["measured", "predicted"])
def test_two_deviations_are_no_certainty(rounds: ModuleType, noisy: str) -> None:
    """A pair that is out of order by little more than chance allows is noisy, until more rounds tell."""
    certain = {"a": [1.0, 1.0], "b": [2.5, 2.5], "c": [-5.0, -5.0], "d": [9.0, 9.0]}
    varied = certain | {"a": [0.2, 2.8], "b": [0.0, 0.0]}

    def judged(count: int) -> Any:
        limit = rounds.beyond_chance(12, 2 * count)
        sides = [{name: one * count for name, one in side.items()} for side in (certain, varied)]
        predicted, measured = sides if noisy == "measured" else sides[::-1]
        return rounds.agreement(predicted, measured, 0.1, limit)

    assert judged(1)["out_of_order"] == 0
    few, many = judged(5), judged(50)
    assert (few["in_order"], few["out_of_order"], few["certain"]) == (5, 1, [])
    assert rounds.doubts([few]) == [f"{few['out_of_order_pairs'][0]}: perhaps by chance"]
    assert (many["in_order"], many["out_of_order"], many["certain"]) == (5, 1, many["out_of_order_pairs"])
    assert rounds.doubts([many]) == []


def test_what_both_sides_of_a_pair_share_is_no_noise(rounds: ModuleType) -> None:
    shared = [0.0, 70.0, 20.0, 90.0, 40.0]
    costs = {name: [cost + more for more in shared] for name, cost in (("a", 3.0), ("b", 2.0), ("c", 1.0))}
    said = {name: costs[other] for name, other in zip("abc", "acb", strict=True)}
    found = rounds.agreement(said, costs, 0.1, 5.0)
    assert (found["in_order"], found["undecided"], len(found["certain"])) == (2, 0, 1)


@pytest.mark.parametrize("count", [3, 5, 12])
def test_a_right_prediction_seldom_fails_by_chance(rounds: ModuleType, count: int) -> None:
    """Costs in their order, but much closer than the noise: many a pair seems to be out of order."""
    draw, names = random.Random(0), "abcdefg"
    predicted = {name: [10.0 + i] * count for i, name in enumerate(names)}
    limit = rounds.beyond_chance(21, count)
    found = []
    for _ in range(100):
        measured = {name: [10.0 + i + draw.gauss(0, 100) for _ in range(count)] for i, name in enumerate(names)}
        found.append(rounds.agreement(predicted, measured, 0.1, limit))
    assert sum(bool(one["out_of_order"]) for one in found) > 30
    assert sum(bool(one["certain"]) for one in found) <= 5


def test_how_much_is_beyond_chance(rounds: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Student's t, from a table."""
    monkeypatch.setattr(rounds, "CHANCE", 0.01)
    table = {(1, 3): 6.965, (1, 5): 3.747, (1, 11): 2.764, (10, 5): 7.173, (10, 31): 3.385, (1, 10**6): 2.326}
    assert {key: rounds.beyond_chance(*key) for key in table} == pytest.approx(table, rel=0.05)


def test_rank_correlation(rounds: ModuleType) -> None:
    assert rounds.rank_correlation([1, 2, 3], [10, 20, 15]) == pytest.approx(0.5)
    assert rounds.rank_correlation([1, 1, 2], [5, 5, 9]) == pytest.approx(1.0)
    assert rounds.rank_correlation([1, 1, 1], [1, 2, 3]) is None
