"""The losses of this library behind the signatures of Liger-Kernel's autograd Functions.

Liger's tests call `Function.apply` with positional arguments, through their module, through their functional form, or
bare. The classes here take these arguments and give the 4-tuple that is expected of them. Every call is recorded, with
the gradients that it alone contributed, and can be held to float64 afterwards: `Recorder.check`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

import syncfree_ext
from cases import Call
from exactness import check_gradients, check_values, exact

# Above that, float64 takes seconds a call and tens of GB.
LARGEST = 2**26

# In the order of LigerFusedLinearCrossEntropyFunction.apply. What newer versions append chooses an implementation.
LINEAR_ARGUMENTS: dict[str, Any] = {
    "input": None,
    "weight": None,
    "target": None,
    "bias": None,
    "ce_weight": None,
    "ignore_index": -100,
    "lse_square_scale": 0.0,
    "label_smoothing": 0.0,
    "reduction": "mean",
    "softcap": None,
    "return_z_loss": False,
    "accum_dtype": None,
    "use_token_scaling": False,
    "return_token_accuracy": False,
    "return_predicted_tokens": False,
}
# In the order of LigerCrossEntropyFunction.apply.
LOGITS_ARGUMENTS: dict[str, Any] = {
    "input": None,
    "target": None,
    "weight": None,
    "ignore_index": -100,
    "lse_square_scale": 0.0,
    "label_smoothing": 0.0,
    "reduction": "mean",
    "softcap": None,
    "return_z_loss": False,
    "return_token_accuracy": False,
    "return_predicted_tokens": False,
}
# In the order of LigerFusedLinearCrossEntropySM90Function.apply, which returns the loss alone.
SM90_ARGUMENTS: dict[str, Any] = {
    "input": None,
    "weight": None,
    "target": None,
    "ignore_index": -100,
    "reduction": "mean",
    "bias": None,
}


def named(order: dict[str, Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments by name, defaults for those that are missing, what is beyond the last name left out."""
    return order | dict(zip(order, args, strict=False))


@dataclass
class _Record:
    call: Call
    out: Any
    trainable: str
    compute: torch.dtype
    logits: bool
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)
    upstreams: list[Tensor] = field(default_factory=list)

    @property
    def size(self) -> int:
        """How many logits there are."""
        rows = self.call.target.numel()
        return rows * (self.call.input.shape[-1] if self.logits else self.call.linear_weight.shape[0])


@dataclass
class Recorder:
    """The calls of a test, until they are checked."""

    calls: list[_Record] = field(default_factory=list)
    current: ClassVar[Recorder]

    def check(self) -> int:
        """Hold the recorded calls to float64, those of at most LARGEST logits, and forget them; how many were held."""
        calls, self.calls = self.calls, []
        held = [record for record in calls if record.size <= LARGEST]
        for record in held:
            _check(record)
        return len(held)

    def record(self, call: Call, out: Any, leaves: dict[str, Tensor], compute: torch.dtype, logits: bool) -> None:
        """Keep the call, and from now on the upstream gradient and those of the aliased leaves."""
        trainable = "".join(name for name, leaf in leaves.items() if leaf.requires_grad)
        record = _Record(call, out, trainable, compute, logits)
        self.calls.append(record)
        loss = out.loss
        if not loss.requires_grad:
            return
        loss.register_hook(partial(_keep, record.upstreams))
        for name, leaf in leaves.items():
            if leaf.requires_grad:
                leaf.register_hook(partial(_keep, record.gradients.setdefault(name, [])))


def _keep(into: list[Tensor], gradient: Tensor) -> None:
    """A hook that returns nothing, or what it returns would take the gradient's place."""
    into.append(gradient.detach().clone())


Recorder.current = Recorder()


def _check(record: _Record) -> None:
    """The first backward of the call; later ones must be its bits times the upstream gradient, which others test."""

    def plain(t: Any) -> Any:
        return t.detach() if isinstance(t, Tensor) else t

    call = record.call
    options = {name: plain(value) for name, value in call.options.items()}
    scored = Call(
        plain(call.input), plain(call.linear_weight), plain(call.target), plain(call.linear_bias), options, None
    )  # type: ignore[arg-type]
    ignored = scored.target == (-100 if options.get("ignore_index") is None else options["ignore_index"])
    classes = scored.input.shape[-1] if record.logits else scored.linear_weight.shape[0]
    if bool(((scored.target < 0) | (scored.target >= classes))[~ignored].any()):
        assert not bool(record.out.loss.isfinite().all()), "a target out of range went unnoticed"
        return
    shape = record.out.loss.shape
    upstream = record.upstreams[0] if record.upstreams else torch.ones(shape, device=record.out.loss.device)
    wide = torch.float64 if record.compute == torch.float64 else torch.float32
    scored.upstream = upstream.to(wide).expand(shape)
    e = exact(scored, record.compute, record.logits)
    # 0/0 and the like, which the tests ask for themselves.
    if not bool(e.gradients.output.loss.isfinite().all()):
        return
    out = type(record.out)(*(plain(value) for value in record.out))
    check_values(scored, e, out, record.compute)
    if record.upstreams:
        grads = tuple(plain(record.gradients.get(name, [None])[0]) for name in "xwb")
        check_gradients(scored, e, grads, record.trainable, record.compute)  # type: ignore[arg-type]


def _alias(t: Tensor | None) -> Tensor | None:
    """The same memory behind a node of its own, whose gradient is that of one call alone."""
    return None if t is None else t.view_as(t)


def _options(a: dict[str, Any], weight: Tensor | None) -> dict[str, Any]:
    return {
        "weight": weight,
        "ignore_index": a["ignore_index"],
        "z_loss_weight": a["lse_square_scale"],
        "label_smoothing": a["label_smoothing"],
        "reduction": a["reduction"],
        "softcap": a["softcap"],
        "token_scaling": a.get("use_token_scaling", False),
    }


def _extras(a: dict[str, Any]) -> dict[str, bool]:
    names = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens")
    # The logsumexp is asked for so that what comes back always has a name.
    return {name: bool(a.get(name)) for name in names} | {"return_logsumexp": True}


def _recordable(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"shift": 0, "token_weight": None, "logit_scale": 1.0}


def _linear(a: dict[str, Any]) -> Any:
    x, w, bias = _alias(a["input"]), _alias(a["weight"]), _alias(a.get("bias"))
    assert x is not None
    assert w is not None
    options = _options(a, a.get("ce_weight"))
    accum = a.get("accum_dtype")
    out = syncfree_ext.linear_cross_entropy(
        x, w, a["target"], linear_bias=bias, accum_dtype=accum, **options, **_extras(a)
    )
    kind = x.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    leaves = {name: leaf for name, leaf in zip("xwb", (x, w, bias), strict=True) if leaf is not None}
    call = Call(x, w, a["target"], bias, _recordable(options), torch.ones(()))
    Recorder.current.record(call, out, leaves, compute, False)
    return out


class FusedLinearCrossEntropyFunction:
    """In the place of LigerFusedLinearCrossEntropyFunction."""

    supports_inner_impl_dispatch = False

    @staticmethod
    def apply(*args: Any) -> tuple[Tensor | None, ...]:
        """(loss, z_loss, token_accuracy, predicted_tokens); None for what was not asked for."""
        out = _linear(named(LINEAR_ARGUMENTS, args))
        return out.loss, out.z_loss, out.token_accuracy, out.predicted_tokens


class FusedLinearCrossEntropySM90Function:
    """In the place of LigerFusedLinearCrossEntropySM90Function."""

    @staticmethod
    def apply(*args: Any) -> Tensor:
        """The loss."""
        loss: Tensor = _linear(LINEAR_ARGUMENTS | named(SM90_ARGUMENTS, args)).loss
        return loss


class CrossEntropyFunction:
    """In the place of LigerCrossEntropyFunction, whose losses have the dtype of the logits."""

    @staticmethod
    def apply(*args: Any) -> tuple[Tensor | None, ...]:
        """(loss, z_loss, token_accuracy, predicted_tokens); None for what was not asked for."""
        a = named(LOGITS_ARGUMENTS, args)
        logits = _alias(a["input"])
        assert logits is not None
        options = _options(a, a["weight"])
        out = syncfree_ext.cross_entropy(logits, a["target"], **options, **_extras(a))
        call = Call(logits, logits.new_empty(0), a["target"], None, _recordable(options), torch.ones(()))
        Recorder.current.record(call, out, {"x": logits}, logits.dtype, True)
        z_loss = None if out.z_loss is None else out.z_loss.to(logits.dtype)
        return out.loss.to(logits.dtype), z_loss, out.token_accuracy, out.predicted_tokens
