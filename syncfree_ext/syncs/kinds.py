"""The kinds of host waits, the ops that make the host wait by their nature, and what to do about each.

An op is looked up here before it runs. A rule sees its arguments and answers with a `Hint`, or with None when this call
cannot wait (a copy within the GPU, an index that is no mask). Rules look at devices, dtypes and pinning alone: they
read no data and launch nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Kind(str, enum.Enum):
    """Why the host waited. The value is what reports and allow files say."""

    SCALAR = "scalar read"
    COPY = "pageable copy"
    SHAPE = "dynamic shape"
    EXPLICIT = "explicit"
    COLLECTIVE = "collective"
    ALLOCATOR = "allocator"
    INSIDE = "inside an op"

    def __str__(self) -> str:
        return self.value


class Counts(enum.Enum):
    """When a call that may wait becomes a row of the report."""

    ALWAYS = "always"  # it waits by its nature, even when the GPU happens to be idle
    IF_SLOW = "if slow"  # it blocks the host or returns at once, and the time tells which
    IF_WAITED = "if waited"  # only the GPU's own clock tells: it drained while the op ran


@dataclass(frozen=True)
class Hint:
    """What is known of a call before it runs."""

    kind: Kind
    detail: str = ""
    counts: Counts = Counts.ALWAYS


ADVICE: Mapping[Kind, str] = {
    Kind.SCALAR: "Keep the value on the device. To log it: AsyncScalars, or MetricBuffer read at the log interval; to "
    "branch on it: torch.where, or a check some steps later (NonFiniteGuard).",
    Kind.COPY: "From pinned memory with non_blocking=True (DataLoader(pin_memory=True)); make constants on the device, "
    "once, with torch.full or torch.arange.",
    Kind.SHAPE: "Give the output a size that the host knows: torch.where or masked_fill for x[mask], masked_indices or "
    "nonzero_static for nonzero, repeat_interleave(output_size=...).",
    Kind.EXPLICIT: "Order work with stream.wait_event or stream.wait_stream, which block no host; time with events "
    "that are read a step later.",
    Kind.COLLECTIVE: "Pass tensors, not objects, reduce at the log interval, and wait on the stream, not on the host.",
    Kind.ALLOCATOR: "Allocate before the loop and reuse: fixed shapes, pinned buffers made once, no empty_cache in a "
    "step; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against retries.",
    Kind.INSIDE: "The op waits inside its own C++ code. Look there for .item(), a blocking copy or a stream "
    "synchronize, or use another op.",
}

_DETAIL_ADVICE: Mapping[str, str] = {
    "pinned, but blocking": "The memory is pinned already: pass non_blocking=True.",
    "device to pageable memory": "Copy into pinned memory with non_blocking=True and read it after an event, a step "
    "later; AsyncScalars does that for scalars.",
    "number to device": "x[index] = number copies the number to the device, and waits: index_fill_, masked_fill_ and "
    "x[a:b] = number do not, nor does a 0-d tensor that is on the device already.",
    "pinned allocation": "Pinned memory is slow to allocate and may stall the GPU: allocate it once, before the loop.",
    "empty_cache": "empty_cache waits for the GPU and returns memory that the next step allocates again: drop it.",
}


def advice(kind: Kind, detail: str = "") -> str:
    """What to do about a wait of this kind."""
    return _DETAIL_ADVICE.get(detail, ADVICE[kind])


Rule = Callable[[Sequence[Any], Mapping[str, Any], str], "Hint | None"]


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def on_device(args: Sequence[Any], device: str) -> bool:
    """Whether any tensor among the arguments lives on the accelerator."""
    return any(tensor.device.type == device for tensor in _tensors(args))


def _on_device_only(hint: Hint) -> Rule:
    def rule(args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> Hint | None:
        return hint if on_device(args, device) else None

    return rule


def _transfer(source: Tensor, target: str, non_blocking: bool, device: str, pinned_target: bool = False) -> Hint | None:
    origin = source.device.type
    if origin == target or device not in (origin, target):
        return None
    if origin == device:
        if non_blocking:
            # `.to("cpu", non_blocking=True)` allocates pinned memory. A copy into pageable memory blocks, unless small.
            return None if pinned_target else Hint(Kind.COPY, "device to pageable memory", Counts.IF_SLOW)
        return Hint(Kind.COPY, "device to pageable memory" if not pinned_target else "pinned, but blocking")
    pinned = source.is_pinned()
    if non_blocking:
        return None if pinned else Hint(Kind.COPY, "pageable, non_blocking ignored", Counts.IF_SLOW)
    return Hint(Kind.COPY, "pinned, but blocking" if pinned else "pageable memory to device")


def _to_copy(args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> Hint | None:
    target = kwargs.get("device")
    if target is None:
        return None
    non_blocking = bool(kwargs.get("non_blocking"))
    return _transfer(args[0], torch.device(target).type, non_blocking, device, pinned_target=non_blocking)


def _copy(args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> Hint | None:
    target, source = args[0], args[1]
    if source.device.type == target.device.type:
        return None
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    pinned = target.device.type == "cpu" and target.is_pinned()
    return _transfer(source, target.device.type, non_blocking, device, pinned)


def _lift_fresh(args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> Hint | None:
    """torch.tensor(data, device=...): by now the copy is over, so that only its place is known, not its time."""
    return Hint(Kind.COPY, "pageable memory to device") if on_device(args, device) else None


def _is_mask(index: Any, device: str) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) and index.device.type == device


def _index(args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> Hint | None:
    return Hint(Kind.SHAPE, "index by a mask") if any(_is_mask(index, device) for index in args[1]) else None


def _index_put(args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> Hint | None:
    target, indices, value = args[:3]
    accumulate = bool(args[3] if len(args) > 3 else kwargs.get("accumulate"))
    from_host = target.device.type == device and value.numel() == 1 and value.device.type == "cpu"
    used = [index for index in indices if isinstance(index, Tensor)]
    if from_host and not accumulate and len(used) == 1 and _is_mask(used[0], device):
        return None  # becomes masked_fill, which needs no count and takes the number as an argument
    return _index(args, kwargs, device) or (Hint(Kind.COPY, "number to device") if from_host else None)


def _repeat_interleave(args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> Hint | None:
    if kwargs.get("output_size") is not None or not on_device(args, device):
        return None
    return Hint(Kind.SHAPE, "repeat_interleave without output_size")


def _pinned_allocation(args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> Hint | None:
    return Hint(Kind.ALLOCATOR, "pinned allocation", Counts.IF_SLOW) if kwargs.get("pin_memory") else None


_SCALAR = _on_device_only(Hint(Kind.SCALAR))
_SHAPE = _on_device_only(Hint(Kind.SHAPE))

_RULES: Mapping[str, Rule] = {
    "aten::_local_scalar_dense": _SCALAR,
    "aten::equal": _SCALAR,
    "aten::is_nonzero": _SCALAR,
    "aten::nonzero": _SHAPE,
    "aten::masked_select": _SHAPE,
    "aten::_unique": _SHAPE,
    "aten::_unique2": _SHAPE,
    "aten::unique_dim": _SHAPE,
    "aten::unique_consecutive": _SHAPE,
    "aten::unique_dim_consecutive": _SHAPE,
    "aten::bincount": _SHAPE,
    "aten::index": _index,
    "aten::index_put": _index_put,
    "aten::index_put_": _index_put,
    "aten::_index_put_impl_": _index_put,
    "aten::repeat_interleave": _repeat_interleave,
    "aten::_to_copy": _to_copy,
    "aten::copy_": _copy,
    "aten::lift_fresh": _lift_fresh,
    "aten::_pin_memory": lambda args, kwargs, device: Hint(Kind.ALLOCATOR, "pinned allocation", Counts.IF_SLOW),
    "aten::empty": _pinned_allocation,
    "aten::empty_like": _pinned_allocation,
    "aten::empty_strided": _pinned_allocation,
    "aten::zeros": _pinned_allocation,
    "aten::ones": _pinned_allocation,
    "aten::full": _pinned_allocation,
}


# Ops that make a view, which gives the GPU nothing to do. Nearly half of the ops of a training step are such.
_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select",
        "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view",
    )
)  # fmt: skip


def is_view(op: Any) -> bool:
    """Whether an op overload only makes a view of a dense tensor."""
    schema = getattr(op, "_schema", None)
    return schema is not None and schema.name in _VIEWS and not schema.is_mutable


def rule_of(op: Any) -> Rule | None:
    """The rule of an op overload; None for one that has no reason to wait."""
    schema = getattr(op, "_schema", None)
    return _RULES.get(schema.name) if schema is not None else None


def kind_of_unknown(name: str, in_distributed: bool) -> Kind:
    """The kind of an op without a rule that was seen to wait."""
    if in_distributed or name.startswith(("c10d", "_c10d_functional")):
        return Kind.COLLECTIVE
    return Kind.INSIDE
