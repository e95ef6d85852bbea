"""What tools/check_finder.py concludes from times on a machine whose speed drifts: runs are compared within a round."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

SURE = 2.0  # so many deviations from zero have a sign
TELLING = 3  # fewer pairs than this say nothing about an order
CHANCE = 0.05  # that any pair of a loop is called wrong without being it


class Median(NamedTuple):
    """The median over some rounds, and its standard deviation if the values are on a bell curve."""

    value: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Median:
        """That of two values or more."""
        return cls(statistics.median(values), 1.25 * statistics.stdev(values) / math.sqrt(len(values)))

    @classmethod
    def of_differences(cls, x: Sequence[float], y: Sequence[float]) -> Median:
        """Of x - y, each within a round: what the speed of the machine adds to both is not in it."""
        return cls.of([a - b for a, b in zip(x, y, strict=True)])

    def exceeds(self, least: float = 0.0, deviations: float = SURE) -> bool:
        """Whether it is more than so much, and more than so many deviations from zero."""
        return self.value > max(least, deviations * self.deviation)

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {SURE * self.deviation:.3f}"


def in_rounds(runs: Mapping[str, Callable[[], Any]], seconds: float, least: int = 3) -> dict[str, list[Any]]:
    """What each run returns, in rounds until the seconds are used up. Orders differ, so that a drift meets all."""
    results: dict[str, list[Any]] = {name: [] for name in runs}
    order, shuffle, begin = list(runs), random.Random(0), time.perf_counter()
    for index in itertools.count():
        if index >= least and (time.perf_counter() - begin) * (index + 1) / index > seconds:
            break
        shuffle.shuffle(order)
        for name in order:
            results[name].append(runs[name]())
    return results


def beyond_chance(tests: int, rounds: int) -> float:
    """How many deviations, which are estimated from so few rounds, none of so many tests exceeds by chance.

    Student's t by Wallace's approximation, which is a little too large for three rounds.
    """
    z, free = statistics.NormalDist().inv_cdf(1 - CHANCE / tests), rounds - 1
    return math.sqrt(free * math.expm1((free - 5 / 6) * (z / (free - 2 / 3 + 0.1 / free)) ** 2))


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's, with means of tied ranks; None where one side is constant."""
    ranks = [[sum((w < v) + 0.5 * (w == v) for w in values) for v in values] for values in (x, y)]
    return None if any(len(set(values)) < 2 for values in ranks) else statistics.correlation(*ranks)


def agreement(
    predicted: Mapping[str, Sequence[float]], measured: Mapping[str, Sequence[float]], least: float, limit: float
) -> dict[str, Any]:
    """Whether predicted costs have the order of measured ones, all in ms and of the same rounds.

    Pairs count whose measured costs differ by more than twice the noise of their difference, and by more than `least`.
    Where the predictions differ by less than twice theirs, the pair is undecided. Those out of order by more than
    `limit` deviations on both sides are certain.
    """
    undecided, wrong, certain, right = [], [], [], 0
    for a, b in itertools.permutations(predicted, 2):
        difference = Median.of_differences(measured[a], measured[b])
        if not difference.exceeds(least):
            continue
        forth = Median.of_differences(predicted[a], predicted[b])
        back = Median.of_differences(predicted[b], predicted[a])
        text = f"{a} costs {difference} ms more than {b}, and {forth} ms are predicted"
        if forth.exceeds():
            right += 1
        elif back.exceeds():
            wrong.append(text)
            certain += [text] if all(side.exceeds(deviations=limit) for side in (difference, back)) else []
        else:
            undecided.append(text)
    x, y = ([statistics.median(costs[name]) for name in predicted] for costs in (predicted, measured))
    return {
        "rank_correlation": rank_correlation(x, y),
        "in_order": right,
        "undecided": len(undecided),
        "out_of_order": len(wrong),
        "largest_error_ms": max(abs(a - b) for a, b in zip(x, y, strict=True)),
        "undecided_pairs": undecided,
        "out_of_order_pairs": wrong,
        "certain": certain,
    }


def doubts(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why what was found of a loop's costs says nothing about their order; empty if it does."""
    right, open_, wrong = (sum(one[key] for one in found) for key in ("in_order", "undecided", "out_of_order"))
    if right + open_ + wrong < TELLING:
        return [f"only {right + open_ + wrong} pairs of costs can be told apart"]
    if any(one["certain"] for one in found):
        return []
    if wrong:
        return [f"{text}: perhaps by chance" for one in found for text in one["out_of_order_pairs"]]
    return [f"the predictions leave {open_} of {right + open_} pairs undecided"] if open_ >= right else []
