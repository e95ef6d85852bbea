"""How long the GPU worked for an op, where its event alone does not tell."""

from __future__ import annotations

import pytest
import torch

from syncfree_ext.syncs.collect import Timed, work_of
from syncfree_ext.syncs.timer import like_of


def test_starved_ops_take_the_gpu_as_long_as_calls_alike() -> None:
    """After a wait the GPU is starved, and an event tells only that an op took it no longer than the host.

    An op that is not known from elsewhere was short if it was done when its event was in place. Otherwise it took what
    came after the call's return, and a little.
    """
    like = ("op", 4, True)
    lagging = [Timed(i * 1e-5, (i + 1) * 1e-5, i * 1e-4, (i + 1) * 1e-4, None, like) for i in range(3, 6)]
    starved = Timed(1.0, 1.0 + 5e-4, 1.0, 1.0 + 5e-4, None, like)
    others = [
        Timed(2.0, 2.0 + call, 2.0, 2.0 + call + late, None, ("op", 5 + i, True))
        for i, (call, late) in enumerate([(1e-5, 0.0), (1e-5, 12e-6), (1e-5, 17e-6), (6e-6, 0.0)])
    ]
    calls = [*lagging, starved, *others]  # 10 us each in the median
    assert work_of(calls, recording=0.0) == pytest.approx([1e-4] * 4 + [4e-6, 15e-6, 2e-5, 3e-6])  # the last one: half
    # An event that is in place late says nothing of what came before it.
    assert work_of(calls, recording=10e-6) == pytest.approx([1e-4] * 4 + [4e-6, 4e-6, 2e-5, 3e-6])


def test_calls_alike_are_guessed_alike() -> None:
    """One event that came late by chance is outvoted."""
    calls = [Timed(i, i + 1e-5, i, i + 1e-5 + late, None, ("op", 4, True)) for i, late in enumerate([0, 0, 15e-6])]
    assert work_of(calls) == pytest.approx([4e-6] * 3)


def test_work_that_outlasts_its_call_began_near_its_end() -> None:
    """An idle GPU begins when it is handed something: not with the call, which may be slow. A call that always takes
    many times as long as others hands over something all the time."""
    others = [Timed(10.0 + i, 10.0 + i + 5e-5, 11.0 + i, 11.0 + i + 1e-5, None, ("op", 0, True)) for i in range(9)]
    slow = Timed(0.0, 1e-4, 0.0, 3e-4, None, ("op", 1, True))
    met = Timed(1.0, 1.0 + 1e-4, 1.0 + 9.9e-5, 1.0 + 3e-4, None, ("op", 2, True))  # other work until shortly before
    known = Timed(2.0, 2.0 + 1e-5, 2.0 + 1e-4, 2.0 + 4.5e-4, None, ("op", 3, True))
    alike = Timed(3.0, 3.0 + 3e-4, 3.0, 3.0 + 5e-4, None, ("op", 3, True))
    longer = Timed(4.0, 4.0 + 1e-4, 4.0, 4.0 + 6e-4, None, ("op", 3, True))
    always = [Timed(5.0 + i, 5.0 + i + 5e-3, 5.0 + i, 5.0 + i + 8e-3, None, ("op", 4, True)) for i in range(2)]
    at_times = [
        Timed(7.0 + i, 7.0 + i + call, 7.0 + i, 7.0 + i + call + 1e-4, None, ("op", 5, True))
        for i, call in enumerate([5e-3, 5e-5])
    ]
    calls = [*others, slow, met, known, alike, longer, *always, *at_times]
    expected = [2.08e-4, 2.01e-4, 3.5e-4, 3.5e-4, 5e-4, 7.8e-3, 7.8e-3, 1.08e-4, 1.08e-4]
    assert work_of(calls) == pytest.approx([1e-5] * 9 + expected)


def test_calls_alike_by_what_they_give_or_change() -> None:
    """Lists of tensors have a size too: a model has several recurrent layers, and lists of parameters."""
    x, y = torch.ones(3), torch.ones(5)
    alike = [
        like_of("lstm", (), (x, y)), like_of("lstm", (), (x, x)), like_of("add_", ([x, y],), None),
        like_of("add_", ([x],), None), like_of("size", (x,), 3), like_of("nothing", (), None),
    ]  # fmt: skip
    assert alike == [
        ("lstm", 10, False), ("lstm", 8, False), ("add_", 10, False), ("add_", 4, False), ("size", 4, False),
        ("nothing", 0, False),
    ]  # fmt: skip
