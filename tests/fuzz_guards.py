"""Tensors in memory of their own, between bytes that nobody may read or write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cases import Call

# Of each side, in bytes. The filler is NaN in every floating dtype and -1, which is no class, in the integer ones: what
# reads it does not go unseen either.
_GUARD = 256
_FILLER = 0xFF


def _once(t: Tensor) -> tuple[slice, ...]:
    """An index of each element in memory once, whatever is expanded."""
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())


class Guards:
    """Hands out copies of tensors on a device, and says afterwards whether anything around them has changed.

    A copy has the shape, the strides and the alignment of its original. The bytes before, behind and between its
    elements are guards; so are the elements themselves, unless it is `writable`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: list[tuple[str, Tensor, Tensor, slice]] = []

    def hold(self, t: Tensor, name: str = "tensor", writable: bool = False) -> Tensor:
        """The copy. A writable one is contiguous."""
        if t.device.type == "meta" or t.layout != torch.strided:
            return t
        t = t.detach().contiguous() if writable else t.detach()
        item = t.element_size()
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        start = _GUARD + t.storage_offset() * item % 16
        memory = torch.full((start + span * item + _GUARD,), _FILLER, dtype=torch.uint8)
        inside = memory[start : start + span * item].view(t.dtype)
        held = torch.as_strided(inside, t.shape, t.stride(), inside.storage_offset())
        if t.numel():
            held[_once(t)].copy_(t[_once(t)])
        if self.device.type != "cpu":
            memory = memory.to(self.device)
            inside = memory[start : start + span * item].view(t.dtype)
            held = torch.as_strided(inside, t.shape, t.stride(), inside.storage_offset())
        written = slice(start, start + span * item) if writable else slice(0, 0)
        self._held.append((name, memory, memory.clone(), written))
        return held

    def call(self, call: Call) -> Call:
        """A call with all of its tensors held."""

        def held(name: str, value: Any) -> Any:
            return self.hold(value, name) if isinstance(value, Tensor) else value

        return Call(
            held("input", call.input),
            held("linear_weight", call.linear_weight),
            held("target", call.target),
            held("linear_bias", call.linear_bias),
            {name: held(name, value) for name, value in call.options.items()},
            held("upstream", call.upstream),
        )

    def check(self) -> None:
        """Raise AssertionError if a byte has changed that was not to be written."""
        for name, memory, before, written in self._held:
            changed = memory != before
            changed[written] = False
            if bool(changed.any()):
                first = int(changed.nonzero()[0, 0])
                inside = "inside of" if first >= _GUARD and first < len(memory) - _GUARD else "outside of"
                raise AssertionError(f"{int(changed.sum())} bytes {inside} {name} were written, the first at {first}")
