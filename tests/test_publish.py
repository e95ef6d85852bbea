"""publish_ and read_slot: rows, tickets, counters, errors; what AsyncScalars makes of them is in test_scalars.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from helpers import REFUSED
from syncfree_ext import _slots
from syncfree_ext._slots import COLUMNS, Lane

OPS = torch.ops.syncfree


def new_slots(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, COLUMNS + columns, dtype=torch.int64, device=device)


def test_publish_stores_rows_in_turn(device: torch.device) -> None:
    slots = new_slots(3, 3, device)
    one, big = torch.tensor(1.5, device=device), torch.tensor(2**60 + 1, device=device)
    for ticket in (1, 2, 3, 4):
        OPS.publish_(slots, [one, big], [1, 2, 0], [0.25], first_integer_column=2, ticket=ticket, origin=7)
    rows = slots.tolist()
    assert [row[:4] for row in rows] == [[4, 4, 7, 0], [2, 2, 7, 0], [3, 3, 7, 0]]
    assert slots[0, 4:6].view(torch.float64).tolist() == [0.25, 1.5]
    assert rows[0][6] == 2**60 + 1


def test_publish_counts_on_the_device(device: torch.device) -> None:
    slots, counters = new_slots(2, 1, device), torch.zeros(4, dtype=torch.int64, device=device)
    x = torch.zeros((), device=device)
    for origin in (0, 2, 2, 0, 2):
        OPS.publish_(slots, [x.add_(1)], [0], [], first_integer_column=1, counters=counters, origin=origin)
    assert counters.tolist() == [5, 2, 0, 3]
    assert slots[:, :4].tolist() == [[5, 5, 2, 2], [4, 4, 0, 1]]
    assert slots[:, 4].view(torch.float64).tolist() == [5.0, 4.0]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=250), st.integers(1, 2**62), st.integers(1, 5))
def test_publish_any_number_of_values(values: list[float], ticket: int, rows: int) -> None:
    slots = new_slots(rows, len(values), torch.device("cpu"))
    tensors = [torch.tensor(value, dtype=torch.float64) for value in values[::2]]
    columns = [*range(0, len(values), 2), *range(1, len(values), 2)]
    OPS.publish_(slots, tensors, columns, values[1::2], first_integer_column=len(values), ticket=ticket)
    row = OPS.read_slot(slots, ticket)
    assert row[:2].tolist() == [ticket, ticket]
    assert row[COLUMNS:].view(torch.float64).tolist() == values
    assert (slots.sum(-1) != 0).sum() <= 1, "other rows are left alone"


def test_opcheck(device: torch.device) -> None:
    slots, counters = new_slots(2, 3, device), torch.zeros(3, dtype=torch.int64, device=device)
    values = [torch.tensor(1.5, device=device), torch.tensor([3], device=device)]
    fixed = {"first_integer_column": 2}
    opcheck(OPS.publish_.default, (slots, values, [0, 2, 1], [0.5]), fixed | {"ticket": 3})
    opcheck(OPS.publish_.default, (slots, values, [0, 2], []), fixed | {"counters": counters, "origin": 1})
    opcheck(OPS.read_slot.default, (new_slots(2, 3, torch.device("cpu")), 1))


def test_publish_counts_its_writes(device: torch.device) -> None:
    slots, counters = new_slots(1, 1, device), torch.zeros(2, dtype=torch.int64, device=device)
    before = slots._version, counters._version
    OPS.publish_(slots, [], [0], [1.0], first_integer_column=1, counters=counters)
    assert slots._version > before[0]
    assert counters._version > before[1]


S, X = new_slots(2, 2, torch.device("cpu")), torch.ones(())
FIXED: dict[str, Any] = {"first_integer_column": 1, "ticket": 1}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((S.double(), [], [], []), {}, "slots must be contiguous int64"),
        ((S[:, :3], [], [], []), {}, "slots must be contiguous int64"),
        ((S[:0], [], [], []), {}, "slots must be contiguous int64"),
        ((S, [X], [], []), {}, "columns must have one entry for each of 1 values and 0 constants, got 0"),
        ((S, [X], [2], []), {}, r"columns\[0\] must be in \[0, 2\), got 2"),
        ((S, [X], [1], []), {}, r"values\[0\] must be of an integer dtype for an int64 column, got float32"),
        ((S, [], [1], [1.0]), {}, "constants must be for float64 columns, got column 1"),
        ((S, [torch.ones(2)], [0], []), {}, r"values\[0\] must have one element"),
        ((S, [X + 1j], [0], []), {}, r"values\[0\] must be float64"),
        ((S, [X], [0], []), {"ticket": 0}, "ticket must be at least 1, got 0"),
        ((S, [X], [0], []), {"origin": -1}, "origin must not be negative"),
        (
            (S, [X], [0], []),
            {"counters": torch.zeros(1).long()},
            "counters must be contiguous int64 with an entry for origin 0",
        ),
        ((S, [X], [0], []), {"counters": torch.zeros(3)}, "counters must be contiguous int64"),
    ],
)
def test_errors_of_publish(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(REFUSED, match=f"syncfree::publish_: {message}"):
        OPS.publish_(*arguments, **FIXED | options)
    assert not S.any(), "a slot is written as a whole or not at all"


def test_errors_of_read_slot() -> None:
    with pytest.raises(REFUSED, match="syncfree::read_slot: ticket must be at least 1"):
        OPS.read_slot(S, 0)


@pytest.mark.parametrize("dtype", _slots._KINDS)
def test_the_direct_call_stores_what_the_op_stores(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch, rng: torch.Generator
) -> None:
    """For every dtype, views with an offset, and more values than one launch takes."""
    values = list((torch.rand(130, generator=rng) * 100).to(dtype).to(device)[3:])
    floats = 127 if dtype.is_floating_point else 60
    columns = torch.randperm(127, generator=rng).tolist()
    rows = []
    for way in ("direct", "op"):
        lane = Lane(device, 3, 130, floats)
        with monkeypatch.context() as patch:
            broken = "_publish" if way == "direct" else "_plain_items"
            patch.setattr(_slots, broken, lambda *_args, **_options: None)
            lane.publish(values, columns, ticket=5)
        if device.type == "cuda":
            torch.cuda.synchronize()
        row = lane.read(5)
        assert row is not None
        assert lane.read(4) is lane.read(2) is None
        rows.append(row)
    assert rows[0] == rows[1]
    for value, column in zip(values, columns, strict=True):
        assert rows[0][COLUMNS + column] == value.item()
    assert {type(x) for x in rows[0][COLUMNS : COLUMNS + floats]} == {float}
    assert {type(x) for x in (*rows[0][:COLUMNS], *rows[0][COLUMNS + floats :])} == {int}


class Tagged(Tensor):
    """A subclass, which may be anything but memory."""


def test_values_that_are_more_than_memory() -> None:
    """A negative view, a subclass, and the tensors of a function transform: what they stand for is stored."""
    lane = Lane(torch.device("cpu"), 2, 1, 1)
    negative = torch.tensor([1 + 2j]).conj().imag
    assert negative.is_neg()
    lane.publish([negative], [0], ticket=1)
    assert lane.read(1) == (1, 1, 0, 0, -2.0)
    lane.publish([torch.tensor(3.0).as_subclass(Tagged)], [0], ticket=2)
    assert lane.read(2) == (2, 2, 0, 0, 3.0)
    lane.publish([torch._efficientzerotensor(())], [0], ticket=3)
    assert lane.read(3) == (3, 3, 0, 0, 0.0)

    def square(x: Tensor) -> Tensor:
        y = x * x
        lane.publish([y], [0], ticket=4)
        return y

    assert float(torch.func.grad(square)(torch.tensor(4.0))) == 8.0
    assert lane.read(4) == (4, 4, 0, 0, 16.0)


@pytest.mark.parametrize(
    ("call", "arguments", "error", "message"),
    [
        ("publish", (0, 1, 1, 5, 1), ValueError, "at least 6 integers, got 5"),
        ("publish", (0, 1, 1, 5, 1, 1, 8), ValueError, "3 integers for each value"),
        ("publish", (0, 0, 1, 5, 1, 1), ValueError, "slots and a ticket"),
        ("publish", (0, 1, 1, 5, 1, 0), ValueError, "slots and a ticket"),
        ("publish", (0, 1, 1, 5, 1, 1, 8, 10, 0), ValueError, r"values\[0\] must have .* got 8, 10 and 0"),
        ("publish", (0, 1, 1, 5, 1, 1, 8, 0, 1), ValueError, r"values\[0\] must have .* got 8, 0 and 1"),
        ("publish", (0, 1, 1, 5, 0, 1, 8, 0, 0), ValueError, r"values\[0\] must be of an integer dtype"),
        ("publish", (0, 1, 1, 5, 1, "1"), TypeError, "integer"),
        ("read", (0, 1, 5, 1, 1), ValueError, "expected slots"),
        ("read", (8, 1, 5, 1, 2**63), OverflowError, "too"),
    ],
)
def test_errors_of_the_direct_calls(call: str, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(_slots._cpu, call)(*arguments)


def test_a_torn_row_is_seen() -> None:
    lane = Lane(torch.device("cpu"), 2, 1, 1)
    lane.publish([torch.ones(())], [0], ticket=1)
    assert lane.read(1) is not None
    lane.host[0, 1] = 3  # a writer has begun
    assert lane.read(1) is None
    assert lane.newest() == 3
    assert lane.read(2) is None


@pytest.mark.parametrize("count", [-1, -7, -(2**63), 2**63 - 1])
def test_a_counter_that_holds_anything(count: int, device: torch.device) -> None:
    """The row is one of the slots' whatever the counter says; what lies around them stays as it was."""
    memory = torch.zeros(9, COLUMNS + 1, dtype=torch.int64, device=device)
    counters = torch.tensor([count, 2**63 - 1], device=device)
    OPS.publish_(memory[3:6], [torch.ones((), device=device)], [0], [], first_integer_column=1, counters=counters)
    assert memory[3:6].any()
    assert not memory[:3].any()
    assert not memory[6:].any()
    assert counters[0] == (count + 1 if count < 2**63 - 1 else -(2**63))


def test_an_origin_past_all_counters() -> None:
    for origin in (2, 2**63 - 1):
        with pytest.raises(REFUSED, match=f"counters must be contiguous int64 with an entry for origin {origin}"):
            OPS.publish_(S, [X], [0], [], first_integer_column=1, counters=torch.zeros(3).long(), origin=origin)
