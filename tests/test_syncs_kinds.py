"""The rules of ops that wait by their nature: which call of each waits, by its arguments alone.

Meta tensors stand for those of the device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from syncfree_ext.syncs import Kind
from syncfree_ext.syncs.kinds import _VIEWS, Counts, is_view, kind_of_unknown, rule_of
from syncfree_ext.syncs.timer import engine_of

aten = torch.ops.aten
DEVICE = torch.zeros(4, device="meta")
HOST = torch.zeros(4)
MASK = torch.zeros(4, device="meta", dtype=torch.bool)
LONG = torch.zeros(4, device="meta", dtype=torch.long)
ONE = torch.zeros(())


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "kind", "counts"),
    [
        (aten._local_scalar_dense.default, (DEVICE,), {}, Kind.SCALAR, Counts.ALWAYS),
        (aten._local_scalar_dense.default, (HOST,), {}, None, None),
        (aten.equal.default, (DEVICE, DEVICE), {}, Kind.SCALAR, Counts.ALWAYS),
        (aten.nonzero.default, (DEVICE,), {}, Kind.SHAPE, Counts.ALWAYS),
        (aten.nonzero.default, (HOST,), {}, None, None),
        (aten._unique2.default, (DEVICE,), {}, Kind.SHAPE, Counts.ALWAYS),
        (aten.masked_select.default, (DEVICE, MASK), {}, Kind.SHAPE, Counts.ALWAYS),
        (aten.index.Tensor, (DEVICE, [MASK]), {}, Kind.SHAPE, Counts.ALWAYS),
        (aten.index.Tensor, (DEVICE, [None, MASK]), {}, Kind.SHAPE, Counts.ALWAYS),
        (aten.index.Tensor, (DEVICE, [LONG]), {}, None, None),
        (aten.index_put_.default, (DEVICE, [MASK], DEVICE), {}, Kind.SHAPE, Counts.ALWAYS),
        (aten.index_put_.default, (DEVICE, [MASK], ONE), {}, None, None),
        (aten.index_put_.default, (DEVICE, [None, MASK], ONE), {}, None, None),
        (aten.index_put_.default, (DEVICE, [MASK, LONG], ONE), {}, Kind.SHAPE, Counts.ALWAYS),
        (aten.index_put_.default, (DEVICE, [MASK, MASK], ONE), {}, Kind.SHAPE, Counts.ALWAYS),
        (aten.index_put_.default, (DEVICE, [MASK], ONE, True), {}, Kind.SHAPE, Counts.ALWAYS),
        (aten.index_put_.default, (DEVICE, [LONG], DEVICE), {}, None, None),
        (aten.index_put_.default, (DEVICE, [LONG], ONE), {}, Kind.COPY, Counts.ALWAYS),
        (aten.index_put_.default, (DEVICE, [LONG], ONE, True), {}, Kind.COPY, Counts.ALWAYS),
        (aten.index_put.default, (DEVICE, [LONG], ONE), {"accumulate": True}, Kind.COPY, Counts.ALWAYS),
        (aten.index_put_.default, (HOST, [LONG], ONE), {}, None, None),
        (aten.repeat_interleave.Tensor, (LONG,), {}, Kind.SHAPE, Counts.ALWAYS),
        (aten.repeat_interleave.Tensor, (LONG,), {"output_size": 8}, None, None),
        (aten.repeat_interleave.Tensor, (LONG,), {"output_size": 0}, None, None),
        (aten.repeat_interleave.Tensor, (HOST.long(),), {}, None, None),
        (aten._to_copy.default, (HOST,), {"device": torch.device("meta")}, Kind.COPY, Counts.ALWAYS),
        (aten._to_copy.default, (HOST,), {"device": "meta", "non_blocking": True}, Kind.COPY, Counts.IF_SLOW),
        (aten._to_copy.default, (HOST,), {"dtype": torch.half}, None, None),
        (aten._to_copy.default, (DEVICE,), {"device": "cpu"}, Kind.COPY, Counts.ALWAYS),
        (aten._to_copy.default, (DEVICE,), {"device": "cpu", "non_blocking": True}, None, None),
        (aten._to_copy.default, (DEVICE,), {"device": "meta"}, None, None),
        (aten.copy_.default, (DEVICE, HOST), {}, Kind.COPY, Counts.ALWAYS),
        (aten.copy_.default, (DEVICE, HOST, True), {}, Kind.COPY, Counts.IF_SLOW),
        (aten.copy_.default, (HOST, DEVICE, True), {}, Kind.COPY, Counts.IF_SLOW),
        (aten.copy_.default, (HOST, DEVICE), {"non_blocking": False}, Kind.COPY, Counts.ALWAYS),
        (aten.copy_.default, (DEVICE, DEVICE), {}, None, None),
        (aten.copy_.default, (HOST, HOST), {}, None, None),
        (aten.lift_fresh.default, (DEVICE,), {}, Kind.COPY, Counts.ALWAYS),
        (aten.lift_fresh.default, (HOST,), {}, None, None),
        (aten.empty.memory_format, ([4],), {"pin_memory": True}, Kind.ALLOCATOR, Counts.IF_SLOW),
        (aten.empty.memory_format, ([4],), {"pin_memory": False}, None, None),
        (aten._pin_memory.default, (HOST,), {}, Kind.ALLOCATOR, Counts.IF_SLOW),
    ],
)
def test_rules(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Kind | None, counts: Counts | None
) -> None:
    rule = rule_of(op)
    assert rule is not None
    hint = rule(args, kwargs, "meta")
    assert (hint and hint.kind, hint and hint.counts) == (kind, counts)


@pytest.mark.parametrize("op", [aten.mm.default, aten.nonzero_static.default, aten.where.self, aten.masked_fill.Scalar])
def test_other_ops_have_no_rule(op: Any) -> None:
    assert rule_of(op) is None


def test_ops_without_a_schema() -> None:
    assert rule_of(torch.ops.higher_order.cond) is None


def test_ops_without_a_rule() -> None:
    assert kind_of_unknown("c10d::allreduce_", False) is Kind.COLLECTIVE
    assert kind_of_unknown("mylib::op", True) is Kind.COLLECTIVE
    assert kind_of_unknown("mylib::op", False) is Kind.INSIDE


@pytest.mark.cuda
def test_pinned_memory() -> None:
    """Pinned memory copies without a wait if it is told to, and waits if not."""
    pinned, device = torch.zeros(4, pin_memory=True), torch.zeros(4, device="cuda")
    rule = rule_of(aten.copy_.default)
    assert rule is not None
    for args in ((device, pinned, True), (pinned, device, True)):
        assert rule(args, {}, "cuda") is None
    for args in ((device, pinned, False), (pinned, device, False)):
        hint = rule(args, {}, "cuda")
        assert hint is not None
        assert hint.detail == "pinned, but blocking"


@pytest.mark.parametrize(
    ("op", "args", "out", "engine"),
    [
        (aten.copy_.default, (HOST, DEVICE), HOST, "to host"),
        (aten.copy_.default, (HOST, DEVICE, True), HOST, "to host"),
        (aten.copy_.default, (DEVICE, HOST, True), DEVICE, "to device"),
        (aten.copy_.default, (DEVICE, DEVICE), DEVICE, None),
        (aten._to_copy.default, (DEVICE,), HOST, "to host"),
        (aten._to_copy.default, (HOST,), DEVICE, "to device"),
        (aten._to_copy.default, (HOST,), HOST, None),
        (aten.add.Tensor, (DEVICE, HOST), DEVICE, None),
    ],
)
def test_the_engine_of_a_copy(op: Any, args: tuple[Any, ...], out: torch.Tensor, engine: str | None) -> None:
    assert engine_of(op, args, out, "meta") == engine


VIEWS = {
    "_reshape_alias": lambda x: aten._reshape_alias(x, [4, 2], [2, 1]),
    "_unsafe_view": lambda x: aten._unsafe_view(x, [4, 2]),
    "alias": aten.alias,
    "as_strided": lambda x: aten.as_strided(x, [2], [1]),
    "detach": aten.detach,
    "diagonal": aten.diagonal,
    "expand": lambda x: aten.expand(x, [3, 2, 4]),
    "permute": lambda x: aten.permute(x, [1, 0]),
    "select": lambda x: aten.select(x, 0, 0),
    "slice": lambda x: aten.slice(x, 1, 0, 2),
    "split": lambda x: aten.split(x, 1),
    "split_with_sizes": lambda x: aten.split_with_sizes(x, [1, 3], 1),
    "squeeze": aten.squeeze,
    "t": aten.t,
    "transpose": lambda x: aten.transpose(x, 0, 1),
    "unbind": aten.unbind,
    "unfold": lambda x: aten.unfold(x, 1, 2, 2),
    "unsqueeze": lambda x: aten.unsqueeze(x, 0),
    "view": lambda x: aten.view(x, [8]),
}


@pytest.mark.parametrize("name", sorted(_VIEWS))
def test_views_are_views(name: str) -> None:
    """Each shares its argument's memory, so there was nothing to compute; and it is the op itself that a mode sees."""
    seen: list[Any] = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.arange(8.0).view(2, 4)
    with Sees():
        out = VIEWS[name.removeprefix("aten::")](x)
    assert [op._schema.name for op in seen] == [name]
    assert is_view(seen[0])
    outs = out if isinstance(out, (tuple, list)) else [out]
    assert {t.untyped_storage().data_ptr() for t in outs} == {x.untyped_storage().data_ptr()}


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.clone.default, aten.slice_backward.default, len])
def test_others_are_no_views(op: Any) -> None:
    assert not is_view(op)
