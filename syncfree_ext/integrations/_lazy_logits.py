"""Logits that nobody computes: a stand-in that a model's own code passes from its last layer to its loss.

A model scales or softcaps what its head returns before it hands it to the loss. `LazyLogits` writes such steps down, so
that the fused loss can apply them; whatever else is done to it is an error, because it would be lost. It is a plain
class, not a tensor subclass: torch.compile traces it like any Python object, and nothing of it is left in the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

_HELP = (
    "the fused loss knows factors, softcap = c * tanh(logits / c), and sums of linear layers. Ask for real logits with "
    "skip_logits=False, or undo with syncfree_ext.integrations.transformers.remove_from(model)"
)


class UnknownUseError(AttributeError, TypeError):
    """A model did something to its logits, or asked something of them, that `LazyLogits` cannot write down.

    An AttributeError so that `hasattr` works, and a TypeError because that is what an operator raises.
    """


_Factor: TypeAlias = "float"  # by another name than the method `LazyLogits.float`


class Term(NamedTuple):
    """One linear layer: factor * (input @ weight.T + bias)."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    factor: float = 1.0


class LazyLogits:
    """The value softcap * tanh(sum of terms), or without a softcap the sum of terms.

    Args:
        terms: the layers whose outputs are added; input (..., H_i), weight (V, H_i), bias (V,).
        softcap: what tanh of the sum is multiplied by; None before tanh.
    """

    def __init__(self, terms: tuple[Term, ...], softcap: float | None = None) -> None:
        self.terms = terms
        self.softcap = softcap

    # What a model may ask. Logits are as good as float32: the loss never rounds them.

    @property
    def shape(self) -> torch.Size:
        first = self.terms[0]
        return torch.Size((*first.input.shape[:-1], first.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        return self.terms[0].input.dtype

    @property
    def device(self) -> torch.device:
        return self.terms[0].input.device

    @property
    def ndim(self) -> int:
        return self.terms[0].input.ndim

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    # What a model may do.

    def float(self) -> LazyLogits:
        return self

    def contiguous(self) -> LazyLogits:
        return self

    def to(self, *args: Any, **kwargs: Any) -> LazyLogits:
        for value in (*args, *kwargs.values()):
            dtype = value.dtype if isinstance(value, (Tensor, LazyLogits)) else value
            if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
                _refuse(f"to({dtype})")
            device = value.device if isinstance(value, (Tensor, LazyLogits)) else value
            if isinstance(device, (str, torch.device)) and torch.device(device) != self.device:
                _refuse(f"to({str(device)!r}) from {self.device}")
        return self

    def tanh(self) -> LazyLogits:
        if self.softcap is not None:
            _refuse("a second tanh")
        return LazyLogits(self.terms, softcap=1.0)

    def __mul__(self, factor: object) -> LazyLogits:
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            _refuse(f"a product with {type(factor).__name__}")
        if self.softcap is not None:
            return LazyLogits(self.terms, self.softcap * factor)
        return LazyLogits(tuple(term._replace(factor=term.factor * factor) for term in self.terms))

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> LazyLogits:
        if isinstance(divisor, bool) or not isinstance(divisor, (int, float)):
            _refuse(f"a quotient with {type(divisor).__name__}")
        if self.softcap is not None:
            return LazyLogits(self.terms, self.softcap / divisor)
        return LazyLogits(tuple(term._replace(factor=term.factor / divisor) for term in self.terms))

    def __add__(self, other: object) -> LazyLogits:
        if not isinstance(other, LazyLogits):
            _refuse(
                f"a sum with {type(other).__name__} (an adapter that was put on the head after apply_to? Then call "
                "apply_to once more)"
            )
        if self.softcap is not None or other.softcap is not None or self.shape != other.shape:
            _refuse("a sum after tanh, or of other shapes")
        return LazyLogits(self.terms + other.terms)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> LazyLogits:
        if func is not torch.tanh or len(args) != 1 or kwargs:
            _refuse(getattr(func, "__name__", str(func)))
        logits: LazyLogits = args[0]
        return logits.tanh()

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(f"the attribute {name!r}")

    def __getitem__(self, index: object) -> NoReturn:
        _refuse("indexing")

    def __iter__(self) -> NoReturn:
        _refuse("iteration")

    def __sub__(self, other: object) -> NoReturn:
        _refuse("a difference")

    def linear(self) -> tuple[Tensor, Tensor, Tensor | None, _Factor]:
        """Input, weight, bias and logit_scale of one linear layer with the same logits, before the softcap.

        Terms are put side by side: [x, f * u] and [W, B] have the product x @ W.T + f * u @ B.T. That is a copy of the
        weights, and autograd takes the gradient of the copy apart again.
        """
        first = self.terms[0]
        scale = first.factor if self.softcap is None else first.factor * self.softcap
        if len(self.terms) == 1:
            return first.input, first.weight, first.bias, scale
        dtype = first.input.dtype
        inputs, weights, bias = [first.input], [first.weight.to(dtype)], first.bias
        for term in self.terms[1:]:
            factor = term.factor / first.factor
            inputs.append((term.input * factor).to(dtype))
            weights.append(term.weight.to(dtype))
            if term.bias is not None:
                bias = term.bias * factor if bias is None else bias + term.bias * factor
        return torch.cat(inputs, -1), torch.cat(weights, -1), bias, scale


def _refuse(what: str) -> NoReturn:
    raise UnknownUseError(f"syncfree_ext: this model uses its logits in an unknown way, {what}; {_HELP}")


class _Running(threading.local):
    """The forward that runs in this thread: what it was asked for, and which layers return `LazyLogits` in it.

    Each thread has its own, because several may be in one model at once.
    """

    def __init__(self) -> None:
        # Here, and not as attributes of the class: torch.compile guards on which attributes an instance has.
        self.call: Any = None
        self.lazy_layers: list[HeadLinear] = []


running = _Running()


class HeadLinear(nn.Linear):
    """An nn.Linear that returns `LazyLogits` if `running` has it. `apply_to` makes one of a head by its class alone."""

    def forward(self, input: Tensor) -> Tensor | LazyLogits:  # type: ignore[override]
        """The layer's output (..., V), or its stand-in."""
        if any(layer is self for layer in running.lazy_layers):
            return LazyLogits((Term(input, self.weight, self.bias),))
        return super().forward(input)
