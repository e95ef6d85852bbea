"""Each use of a part of torch that is not documented as public, against the torch at hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncfree_ext.syncs import internals


class Notes(internals.DispatchMode):
    """Notes the node and the number at each op."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str | None, int | None, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = internals.current_node()
        name = None if node is None else internals.node_name(node)
        number = None if node is None else internals.node_sequence(node)
        self.seen.append((func._schema.name, name, number, internals.sequence_number()))
        return func(*args, **(kwargs or {}))


def test_nodes_and_their_numbers() -> None:
    """A node has the number that the counter stood at before its op ran, which is one less than inside it."""
    w = torch.ones(3, 3, requires_grad=True)
    with Notes() as notes:
        (w @ w).relu().sum().backward()
    made = {name: number for name, node, _, number in notes.seen if node is None and name in ("aten::mm", "aten::relu")}
    run = {node: number for _, node, number, _ in notes.seen if node is not None}
    assert run["MmBackward0"] == made["aten::mm"] - 1
    assert run["ReluBackward0"] == made["aten::relu"] - 1


def test_no_node_outside_of_backward() -> None:
    assert internals.current_node() is None


def test_compile_is_left_on() -> None:
    """The method must exist in the base class, or ours would be a name that nobody asks."""
    base = inspect.getmro(internals.DispatchMode)[1]
    assert hasattr(base, "ignore_compile_internals")
    assert internals.DispatchMode.ignore_compile_internals()


def test_top_mode() -> None:
    with Notes() as notes:
        assert internals.top_mode() is notes
    assert internals.top_mode() is None


def test_ops_are_called_without_what_lies_around_them() -> None:
    add, x = torch.ops.aten.add.Tensor, torch.ones(3)
    call = internals.call_of(add)
    assert call is add._op
    assert torch.equal(call(x, x, alpha=2), torch.full((3,), 3.0))
    for other in (torch.ops.higher_order.cond, len):
        assert internals.call_of(other) is other


@pytest.mark.cuda
def test_events_are_recorded_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own code, while the class has another `record`."""
    event, stream = torch.cuda.Event(enable_timing=True), torch.cuda.current_stream()
    monkeypatch.setattr(torch.cuda.Event, "record", None)
    assert internals.record is not torch.cuda.Event.record
    internals.record(event, stream)
    event.synchronize()
    later = torch.cuda.Event(enable_timing=True)
    internals.record(later, stream)
    later.synchronize()
    assert event.elapsed_time(later) >= 0


def test_constructors_flag_is_restored() -> None:
    before = torch._C._only_lift_cpu_tensors()
    with internals.VisibleConstructors():
        assert torch._C._only_lift_cpu_tensors()
        torch.testing.assert_close(torch.tensor([1.0, 2.0]), torch.ones(2).cumsum(0))
    assert torch._C._only_lift_cpu_tensors() == before


@pytest.mark.cuda
def test_constructors_copy_in_an_op_that_a_mode_sees() -> None:
    with internals.VisibleConstructors(), Notes() as notes:
        made = torch.tensor([1.0, 2.0], device="cuda")
    assert made.device.type == "cuda"
    assert "aten::_to_copy" in [name for name, *_ in notes.seen]


@pytest.mark.cuda
@pytest.mark.parametrize("key_of", [internals.stream_key, internals._slow_stream_key])
def test_key_of_a_stream(key_of: Callable[[int], Any]) -> None:
    device = torch.cuda.current_device()
    before = key_of(device)
    with torch.cuda.stream(torch.cuda.Stream()):
        inside = key_of(device)
        assert key_of(device) == inside
    assert inside != before
    assert key_of(device) == before


@pytest.mark.cuda
def test_text_of_the_warning() -> None:
    x = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match=internals.SYNC_WARNING):
            x.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
