"""Interleaved timing: every participant runs a block of calls in each round, and the rounds repeat.

A block lasts at least `block_ms`, because a GPU boosts its clocks in shorter ones; its first call is not counted, and
on a GPU neither is half as long again, in which clocks settle. In each round everyone follows somebody else, because
what ran before leaves the GPU warm or cool. A round's figure is the median of its calls. The result is the median of
the rounds, with the lowest and the highest round as spread.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from .device import Marks, release_memory, synchronize

# Shorter calls are queued behind a kernel that does nothing for some 20 ms.
_SHORT_MS = 0.5
_HEAD_START_CYCLES = 40_000_000

Step = Callable[[int, Marks], Any]
"""One call: gets its running number, to choose among rotated inputs, and marks points in time from its start on."""


@dataclass(frozen=True)
class Stat:
    """Milliseconds: median over rounds, lowest and highest round, number of calls."""

    median: float
    lo: float
    hi: float
    n: int

    def to_json(self) -> dict[str, float]:
        return {"median": self.median, "lo": self.lo, "hi": self.hi, "n": self.n}


def stat(rounds: Sequence[Sequence[float]]) -> Stat:
    """Of the calls of each round; of a single round, the spread is that of the middle eight tenths of its calls."""
    medians = [statistics.median(calls) for calls in rounds if calls]
    n = sum(map(len, rounds))
    if len(medians) > 1:
        return Stat(statistics.median(medians), min(medians), max(medians), n)
    calls = sorted(rounds[0])
    tenth = len(calls) // 10
    return Stat(medians[0], calls[tenth], calls[-1 - tenth], n)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Of single calls, each waited for: median, lowest and highest."""
    return Stat(statistics.median(values), min(values), max(values), len(values)).to_json()


@dataclass
class Participant:
    """Something to time. `around` is entered for each block and makes what `step` needs."""

    name: str
    step: Step
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    parts: dict[str, list[list[float]]] = field(default_factory=dict)
    failure: str | None = None

    def stats(self) -> dict[str, Stat]:
        return {label: stat(rounds) for label, rounds in self.parts.items()}


def block(step: Step, device: torch.device, block_ms: float, first: int = 0) -> dict[str, list[float]]:
    """Milliseconds of each counted call, by part."""
    trial = Marks(device)
    step(first, trial)
    synchronize(device)
    once = trial.milliseconds()["total"]
    calls = max(1, min(2000, math.ceil(block_ms / max(once, 1e-3))))
    if device.type == "cuda" and once < _SHORT_MS:
        # Else the marks would show how long the host takes to queue a call. The queue holds about a thousand launches.
        calls = min(calls, 60)
        torch.cuda._sleep(_HEAD_START_CYCLES)
    elif device.type == "cuda":
        for i in range(calls // 2):
            step(first + 1 + i, Marks(device))
    marks = [Marks(device) for _ in range(calls)]
    for i, mark in enumerate(marks):
        step(first + 1 + i, mark)
    synchronize(device)
    parts: dict[str, list[float]] = {}
    for mark in marks:
        for label, ms in mark.milliseconds().items():
            parts.setdefault(label, []).append(ms)
    return parts


def order_of_round(count: int, number: int) -> list[int]:
    """A permutation of `count` participants. Over `count` rounds, or twice as many for an odd count, each follows each
    other one as often as the others do.

    These are the rows of E. J. Williams' designs balanced for carry-over effects (1949): 0, n - 1, 1, n - 2, ...,
    shifted by one in each round, and for an odd count backwards in every other round.
    """
    first = [i // 2 if i % 2 == 0 else count - 1 - i // 2 for i in range(count)]
    row = [(i + number) % count for i in first]
    return row[::-1] if count % 2 and number % 2 else row


def interleave(
    participants: Sequence[Participant],
    device: torch.device,
    *,
    rounds: int,
    block_ms: float,
    deadline: float = math.inf,
) -> None:
    """Fill `parts` of each participant. Past the deadline (time.monotonic) no further round starts, but one is always
    run.

    A participant that fails in a round is told so in `failure` and left out of the rest; the others go on.
    """
    calls = 0
    for number in range(rounds):
        if number and time.monotonic() > deadline:
            return
        for index in order_of_round(len(participants), number):
            participant = participants[index]
            if participant.failure:
                continue
            try:
                with participant.around():
                    parts = block(participant.step, device, block_ms, calls)
            except Exception as error:
                participant.failure = describe(error)
                release_memory(device)
                continue
            calls += len(parts["total"]) + 1
            for label, values in parts.items():
                participant.parts.setdefault(label, []).append(values)


def describe(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"
