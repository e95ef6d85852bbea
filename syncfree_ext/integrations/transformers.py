"""The fused loss in a causal language model of Hugging Face transformers, by one line: `apply_to(model)`.

The model's own forward runs, with two parts exchanged for the time of the call: its last linear layer returns a
stand-in for the logits (`_lazy_logits.py`), which passes through the factors and softcaps of the family, and its
`loss_function` computes the loss from what the stand-in has written down. So no family is named here, auxiliary losses
stay what they are, and a model that does anything else with its logits is refused: `apply_to` runs the code between the
base model and the loss once, on fake tensors.

The model keeps its parameters, its state_dict and the names of its classes; it can be copied, pickled, saved, wrapped
by PEFT and compiled as a whole (`torch.compile(model, fullgraph=True)`).
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from syncfree_ext import _checks
from syncfree_ext.functional import LinearCrossEntropyOutput, cross_entropy, linear_cross_entropy

from ._lazy_logits import HeadLinear, LazyLogits, running

_NAME = "syncfree_ext.integrations.transformers.apply_to"
# Arguments of a call that are for the loss and not for the model; Liger's names, which TRL passes.
_OWN_ARGUMENTS = ("skip_logits", "return_token_accuracy", "use_token_scaling")


@dataclass(frozen=True)
class _Settings:
    """What `apply_to` was told, for all calls."""

    stock: type
    skip_logits: bool | None
    options: dict[str, Any]


class _Call:
    """One forward: what the loss is asked for, and what it leaves for the output."""

    def __init__(
        self, model: nn.Module, token_accuracy: bool = False, token_scaling: bool = False, probe: bool = False
    ) -> None:
        self.model = model
        self.return_token_accuracy = token_accuracy
        self.token_scaling = token_scaling
        self.probe = probe
        self.losses = 0
        self.token_accuracy: Tensor | None = None


class Applied:
    """What `apply_to` returns: undoes it by `remove()`, or as a context manager."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def remove(self) -> None:
        """Give the model its own loss back; nothing happens if it has it already."""
        if isinstance(_causal_lm(self.model), FusedLossMixin):
            remove_from(self.model)

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def apply_to(
    model: nn.Module,
    *,
    skip_logits: bool | None = None,
    accum_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    workspace_bytes: int | None = None,
) -> Applied:
    """Let a causal language model of transformers compute its loss without its logits. Changes the model in place.

    With labels (…, T), the loss is that of the model itself: position t is scored against label t + 1, or against
    `shift_labels` as they are; -100 is ignored; `num_items_in_batch`, an int or a tensor of one element, is the divisor
    in place of the number of labels that are not ignored. It is applied in forward, so the upstream gradient is 1 and
    backward writes nothing more. Nothing here waits for the device. Without labels the model is as it was.

    Further arguments of a call: `skip_logits` overrides that of apply_to; `return_token_accuracy=True` adds
    `token_accuracy`, 0-D float32, to the output; `use_token_scaling=True` weighs each token by its detached
    probability.

    Call it after `get_peft_model` if an adapter is on the head, and before the model is wrapped or compiled. A second
    call renews the first.

    Args:
        model: a PreTrainedModel with a linear head and transformers' ForCausalLMLoss, or a PEFT model around one.
        skip_logits: whether a call with labels leaves `logits` out of its output and never computes them. None: in
            training mode. A call that returns logits computes the loss from them.
        accum_dtype: as in `linear_cross_entropy`, like the two that follow.
        chunk_rows: how many rows of logits exist at a time.
        workspace_bytes: memory for those logits.

    Returns:
        A handle whose `remove()` undoes it; a context manager that does so at its end.

    Raises:
        TypeError: model is no PreTrainedModel.
        ValueError: the model's head, loss or forward is of a kind that cannot be fused; the message says why. The model
            is then unchanged.
    """
    target: Any = _causal_lm(model)
    if not hasattr(target, "get_output_embeddings"):
        raise TypeError(f"{_NAME}: model must be a PreTrainedModel of transformers, got {type(target).__name__}")
    if isinstance(target, FusedLossMixin):
        remove_from(model)
    stock: Any = type(target)
    if "forward" in target.__dict__:
        raise ValueError(
            f"{_NAME}: the forward of this {stock.__name__} has been replaced on the instance (by accelerate, TRL or "
            "another patch), which would hide the fused loss; call apply_to first"
        )
    _check_loss(target)
    heads = _head_layers(target)
    options = {"accum_dtype": accum_dtype, "chunk_rows": chunk_rows, "workspace_bytes": workspace_bytes}
    for head in heads:
        head.__class__ = HeadLinear
    target.__class__ = _fused_class(stock)
    target._syncfree = _Settings(stock, skip_logits, options)
    try:
        _probe(target)
    except Exception as error:
        remove_from(model)
        raise ValueError(
            f"{_NAME}: {stock.__name__} cannot be fused: between its base model and its loss, {error}"
        ) from error
    return Applied(model)


def remove_from(model: nn.Module) -> None:
    """Undo `apply_to`: the model has its own classes again, and none of the attributes that were added.

    Raises:
        ValueError: apply_to was not called, or something has subclassed the model since (fully_shard does).
    """
    target: Any = _causal_lm(model)
    if not isinstance(target, FusedLossMixin):
        raise ValueError(
            f"{_NAME}: there is nothing to remove, apply_to was not called for this {type(target).__name__}"
        )
    settings: _Settings = target._syncfree
    if type(target) is not _fused_class(settings.stock):
        raise ValueError(f"{_NAME}: the class of the model has been changed since apply_to, to {type(target).__name__}")
    for layer in _lazy_layers(target):
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    target.__class__ = settings.stock
    del target._syncfree


class FusedLossMixin:
    """What the class of a patched model has beside its own: see `_fused_class`."""

    _syncfree: Any

    @property
    def loss_function(self) -> Callable[..., Any]:
        """The fused loss in place of ForCausalLMLoss; one that was set on the model itself stays in force."""
        own: Callable[..., Any] = self.__dict__.get("_loss_function", self._causal_lm_loss)
        return own

    @loss_function.setter
    def loss_function(self, value: Callable[..., Any]) -> None:
        self._loss_function = value

    def _causal_lm_loss(
        self,
        logits: Tensor | LazyLogits,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_unused: Any,
    ) -> Tensor:
        """The signature and meaning of transformers' ForCausalLMLoss, which ignores other arguments as well."""
        call = _current_call(self)
        call.losses += 1
        target = labels if shift_labels is None else shift_labels
        if target is None:
            raise ValueError("syncfree_ext: the loss needs labels or shift_labels, got neither")
        classes = logits.shape[-1]
        if vocab_size is not None and vocab_size != classes:
            raise ValueError(
                f"syncfree_ext: the head has {classes} outputs, but the model's vocab_size is {vocab_size}"
            )
        options: dict[str, Any] = {
            "num_items": _on(num_items_in_batch, logits.device),
            "ignore_index": ignore_index,
            "shift": 1 if shift_labels is None else 0,
            "token_scaling": call.token_scaling,
            "return_token_accuracy": call.return_token_accuracy,
        }
        target = _on(target, logits.device)
        if isinstance(logits, LazyLogits):
            hidden, weight, bias, scale = logits.linear()
            _check_present(weight)
            options.update(linear_bias=bias, logit_scale=scale, softcap=logits.softcap, **self._syncfree.options)
            if call.probe:
                _checks.check_loss_options(_NAME, target, None, "mean", 0.0, logits.softcap, 0)
                return hidden.new_zeros((), dtype=torch.float32)
            out = linear_cross_entropy(hidden, weight, target, **options)
        else:
            out = cross_entropy(logits, target, **options)
        if isinstance(out, LinearCrossEntropyOutput):
            call.token_accuracy = out.token_accuracy
            return out.loss
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle and copy look a class up by its name, where they would find the stock class.
        reduced = list(super().__reduce_ex__(protocol))
        reduced[:2] = [_new_instance, (self._syncfree.stock,)]
        return tuple(reduced)


def _new_instance(stock: type) -> Any:
    fused: Any = _fused_class(stock)
    return fused.__new__(fused)


_making_a_class = threading.Lock()


def _fused_class(stock: type) -> type:
    """One class for each class of models. The lock: a cache alone would let two threads make one each."""
    with _making_a_class:
        return _make_fused_class(stock)


@functools.cache
def _make_fused_class(stock: type) -> type:
    """A subclass of a model's class, under the same name, whose forward is `_forward`.

    A class, and not a forward on the instance or a hook: a copy of the model must not call the original, and PEFT calls
    forward without the hooks. The signature is kept because Trainer and generate look at it.
    """
    signature = inspect.signature(stock.forward)  # type: ignore[attr-defined]
    position = list(signature.parameters).index("labels") - 1

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, stock, position, args, kwargs)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    names = ("__module__", "__qualname__", "__doc__")
    attributes = {name: getattr(stock, name) for name in names}
    return type(stock.__name__, (FusedLossMixin, stock), {"forward": forward, **attributes})


def _forward(model: Any, stock: Any, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    own = {name: kwargs.pop(name, None) for name in _OWN_ARGUMENTS}
    labels = args[position] if len(args) > position else kwargs.get("labels")
    if labels is None:
        if own["return_token_accuracy"] or own["use_token_scaling"]:
            raise ValueError("syncfree_ext: return_token_accuracy and use_token_scaling need labels, got labels=None")
        return _run(model, stock, None, False, args, kwargs)
    skip = own["skip_logits"]
    if skip is None:
        skip = model._syncfree.skip_logits
    if skip is None:
        skip = model.training
    call = _Call(model, bool(own["return_token_accuracy"]), bool(own["use_token_scaling"]))
    output = _run(model, stock, call, bool(skip), args, kwargs)
    if call.losses == 0 and skip:
        raise RuntimeError("syncfree_ext: the model returned without calling its loss_function; use skip_logits=False")
    return _without_stand_in(output, call.token_accuracy)


def _run(model: Any, stock: Any, call: _Call | None, lazy: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's own forward. Nothing of the call is kept on the model, which other threads may be using as well."""
    layers: list[HeadLinear] = _lazy_layers(model) if lazy else []
    if lazy and not layers:
        raise RuntimeError(
            "syncfree_ext: the head of this model was replaced after apply_to (by resize_token_embeddings?); call "
            "apply_to once more"
        )
    before = running.call, running.lazy_layers  # those of a forward that has called this one
    running.call, running.lazy_layers = call, layers
    try:
        return stock.forward(model, *args, **kwargs)
    finally:
        running.call, running.lazy_layers = before


def _current_call(model: Any) -> _Call:
    """The forward of this model that runs in this thread; an empty one where the loss is called by itself."""
    call: _Call | None = running.call
    return call if call is not None and call.model is model else _Call(model)


def _lazy_layers(model: Any) -> list[HeadLinear]:
    """Looked up anew each time: adapters copy and wrap the head."""
    head = model.get_output_embeddings()
    return [m for m in head.modules() if isinstance(m, HeadLinear)] if isinstance(head, nn.Module) else []


def _without_stand_in(output: Any, token_accuracy: Tensor | None) -> Any:
    """The model's output without logits that were not computed, as its own to_tuple leaves out what is None."""
    if isinstance(output, tuple):
        return tuple(value for value in output if not isinstance(value, LazyLogits))
    fields = {name: value for name, value in output.items() if not isinstance(value, LazyLogits)}
    output = type(output)(**fields)
    if token_accuracy is not None:
        # As an item and not as an attribute: what rebuilds an output from its items (accelerate does) must keep it.
        output["token_accuracy"] = token_accuracy
    return output


def _on(value: Any, device: torch.device) -> Any:
    """A tensor on the device. The copy of a pageable tensor is staged at once, so nothing waits and nothing races."""
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def _check_present(weight: Tensor) -> None:
    if torch.compiler.is_compiling() or hasattr(weight, "device_mesh"):
        return  # a DTensor is refused by the loss itself
    if weight.numel() > 0 and weight.untyped_storage().size() == 0:
        raise ValueError(
            "syncfree_ext: the memory of the head's weight was released before the loss (the head is an FSDP unit of "
            "its own); leave the head in the root unit"
        )


def _causal_lm(model: Any) -> Any:
    """The PreTrainedModel inside DistributedDataParallel, torch.compile and PEFT."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def _check_loss(model: Any) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    if "labels" not in inspect.signature(type(model).forward).parameters:
        raise ValueError(f"{_NAME}: the forward of {type(model).__name__} takes no labels")
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"{_NAME}: the loss_function of {type(model).__name__} must be transformers' ForCausalLMLoss, got "
            f"{getattr(model.loss_function, '__name__', model.loss_function)}"
        )


def _head_layers(model: Any) -> list[nn.Linear]:
    """The linear layers of the head whose outputs are logits: one, and with LoRA the second factor of each adapter."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise ValueError(f"{_NAME}: {type(model).__name__} has no output embeddings, got {type(head).__name__}")
    kind = f"the head of {type(model).__name__}"
    base: Any = head
    while hasattr(base, "base_layer") or hasattr(base, "original_module"):
        base = base.base_layer if hasattr(base, "base_layer") else base.original_module
    if type(base) is not nn.Linear:
        raise ValueError(
            f"{_NAME}: {kind} must be a plain nn.Linear, got {type(base).__module__}.{type(base).__name__}"
        )
    layers = [m for m in head.modules() if type(m) is nn.Linear and m.out_features == base.out_features]
    if any("forward" in layer.__dict__ for layer in layers):
        raise ValueError(f"{_NAME}: the forward of {kind} has been replaced on the instance (by a device_map?)")
    return layers


class _BaseOutputs:
    """What a base model returns, in `_probe`: hidden states, and None for everything else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


def _probe(model: Any) -> None:
    """Run what lies between the base model and the loss, on fake tensors; raise unless the stand-in gets through."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    base = model.base_model if model.base_model is not model else getattr(model, "model", None)
    if not isinstance(base, nn.Module):
        raise ValueError("a base model was expected at base_model_prefix, got none")
    layer = _lazy_layers(model)[0]
    parameters = inspect.signature(model.forward).parameters
    off = {name: False for name in ("use_cache", "output_router_logits") if name in parameters}
    call = _Call(model, probe=True)
    before = base.__dict__.get("forward")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        hidden = torch.empty(1, 4, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)
        tokens = torch.zeros(1, 4, dtype=torch.int64, device=layer.weight.device)
        base.forward = lambda *_args, **_kwargs: _BaseOutputs(hidden)
        try:
            output = _run(model, model._syncfree.stock, call, True, (), {"input_ids": tokens, "labels": tokens, **off})
        finally:
            del base.forward
            if before is not None:
                base.forward = before
    if call.losses != 1:
        raise ValueError(f"loss_function was to be called once, and was called {call.losses} times")
    values = output if isinstance(output, tuple) else output.values()
    if not any(isinstance(value, LazyLogits) for value in values):
        raise ValueError("the output of the head was to be among the outputs of the model, and is not")
