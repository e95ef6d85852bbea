"""Autograd and the composite bodies of the ops that csrc/schemas.cpp defines in the namespace `syncfree`.

`flce` and `cross_entropy` are composites: their bodies here read what the stable ABI of the compiled library cannot
read (requires_grad, grad mode, autocast) and call `flce_forward` and `cross_entropy_forward`, which carry autograd.

Nothing here waits for the device. The mathematics is in docs/semantics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from . import _fakes  # noqa: F401  (registers the fakes)
from ._dispatch import below_autograd, is_differentiated, is_traced, reaches_autograd, refuse_transform
from ._load import _CUDA_OPS

_syncfree = torch.ops.syncfree

# The dispatcher drops registrations together with the library object that made them.
_library: Any = torch.library.Library("syncfree", "IMPL")

# The options that are tensors. None of them is differentiable.
_OPTION_TENSORS = ("weight", "token_weight", "num_items", "logit_scale_tensor", "z_loss_weight_tensor")

# The options as the schemas have them.
DEFAULTS = {
    argument.name: argument.default_value
    for argument in _syncfree.flce_forward.default._schema.arguments
    if argument.has_default_value()
}

# ----------------------------------------------------------------------------------------------------------- composites


def _refuse_gradients_of_options(op: str, options: dict[str, Any]) -> None:
    for name in _OPTION_TENSORS:
        tensor = options.get(name)
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"syncfree::{op}: {name.removesuffix('_tensor')} must not require grad, because no gradient is "
                "computed for it; got a tensor with requires_grad=True (detach it)"
            )


def _compute_dtype(input: Tensor, linear_weight: Tensor) -> torch.dtype:
    """The dtype of the matrix products: that of the operands, or autocast's unless both are float64, as in torch."""
    device = input.device.type
    # torch 2.11's Dynamo cannot trace torch.amp.is_autocast_available; these are the devices that kernels exist for.
    if (
        device in ("cpu", "cuda")
        and torch.is_autocast_enabled(device)
        and torch.float64 not in (input.dtype, linear_weight.dtype)
    ):
        return torch.get_autocast_dtype(device)
    if linear_weight.dtype != input.dtype:
        raise TypeError(
            f"syncfree::flce: linear_weight must have the dtype of input, {input.dtype}, got {linear_weight.dtype}"
        )
    return input.dtype


def _without_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that are as the schema has them: each argument of an op takes host time."""
    few: dict[str, Any] = {}
    for name, value in options.items():
        default = DEFAULTS.get(name, few)  # few: equal to none
        if value is not default and (isinstance(value, Tensor) or value != default):
            few[name] = value
    return few


def _is_lean(accum_dtype: torch.dtype | None, compute: torch.dtype, linear_weight: Tensor) -> bool:
    """Whether the weight gradient is added up over chunks in bfloat16. float16 has not the range for it."""
    if accum_dtype is None or accum_dtype == torch.float32:
        return False
    if accum_dtype not in (compute, linear_weight.dtype):
        raise ValueError(
            "syncfree::flce: accum_dtype must be None, torch.float32 or the dtype of linear_weight, "
            f"{linear_weight.dtype}, got {accum_dtype}"
        )
    return accum_dtype == compute == torch.bfloat16


def flce_outputs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    loss_only: bool = False,
    reduction: str = "mean",
    accum_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Call `flce_forward` for the gradients that a backward will ask for, in the dtype that autocast asks for.

    Args:
        input: (rows, H), any strides.
        linear_weight: (V, H), in the dtype of input unless autocast is on.
        target: (rows,) or (B, T) with B * T = rows; int64 or int32.
        linear_bias: (V,), any floating dtype.
        loss_only: leave out what is beside the loss: each tensor takes host time.
        reduction: "mean", "sum" or "none".
        accum_dtype: as in `linear_cross_entropy`.
        options: the other options of `flce`, and the need_* flags of the outputs beside the loss.

    Returns:
        The loss, or the first five outputs of `flce_forward`. Only the first, the loss, is differentiable.

    Raises:
        TypeError: the dtypes of input and linear_weight differ outside autocast.
        ValueError: accum_dtype is not one of those allowed, or an option tensor requires grad.
    """
    _refuse_gradients_of_options("flce", options)
    compute = _compute_dtype(input, linear_weight)
    lean = _is_lean(accum_dtype, compute, linear_weight)
    compute_dtype = None if input.dtype == compute == linear_weight.dtype else compute
    # "none" has no gradient before the upstream gradient of each row is known.
    differentiate = torch.is_grad_enabled() and reduction != "none"
    if reduction != "mean":
        options["reduction"] = reduction
    if lean:
        options["lean"] = True
    if compute_dtype is not None:
        options["compute_dtype"] = compute_dtype
    if differentiate:
        if input.requires_grad:
            options["need_dx"] = True
        if linear_weight.requires_grad:
            options["need_dw"] = True
        if linear_bias is not None and linear_bias.requires_grad:
            options["need_db"] = True
    op = _syncfree.flce_forward.default
    wanted = 1 if loss_only else 5
    if reaches_autograd(input, linear_weight, target, linear_bias, *map(options.get, _OPTION_TENSORS)):
        # The dispatcher would come back to Python at once, to _flce_forward_autograd.
        options = _without_defaults(options)
        if is_differentiated("flce_forward", input, linear_weight, linear_bias):
            return tuple(_FlceForward.apply(input, linear_weight, linear_bias, target, None, options, wanted))
        if not torch.is_grad_enabled():
            return tuple(below_autograd(op, None, input, linear_weight, target, linear_bias, **options)[:wanted])
    # In grad mode too, where nothing seems to need a gradient: a tensor that outlived a transform of torch.func is
    # wrapped, and the one inside may need one.
    outputs: tuple[Tensor, ...] = op(input, linear_weight, target, linear_bias, **options)
    return outputs[:wanted]


def _flce(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None = None, **options: Any
) -> Tensor:
    return flce_outputs(input, linear_weight, target, linear_bias, loss_only=True, **options)[0]


def cross_entropy_outputs(
    logits: Tensor, target: Tensor, *, loss_only: bool = False, **options: Any
) -> tuple[Tensor, ...]:
    """Call `cross_entropy_forward`.

    Args:
        logits: (rows, V), any strides.
        target: (rows,) or (B, T) with B * T = rows; int64 or int32.
        loss_only: as in `flce_outputs`.
        options: the other options of `cross_entropy`, and the need_* flags of the outputs beside the loss.

    Returns:
        The loss, or the first five outputs of `cross_entropy_forward`. Only the first, the loss, is differentiable.

    Raises:
        ValueError: an option tensor requires grad.
    """
    _refuse_gradients_of_options("cross_entropy", options)
    op = _syncfree.cross_entropy_forward.default
    wanted = 1 if loss_only else 5
    if reaches_autograd(logits, target, *map(options.get, _OPTION_TENSORS)):
        options = _without_defaults(options)
        if is_differentiated("cross_entropy_forward", logits):
            return tuple(_CrossEntropyForward.apply(logits, target, None, options, wanted))
        if not torch.is_grad_enabled():
            return tuple(below_autograd(op, None, logits, target, **options)[:wanted])
    outputs: tuple[Tensor, ...] = op(logits, target, **options)
    return outputs[:wanted]


def _cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return cross_entropy_outputs(logits, target, loss_only=True, **options)[0]


_library.impl("flce", _flce, "CompositeImplicitAutograd")
_library.impl("cross_entropy", _cross_entropy, "CompositeImplicitAutograd")


# ------------------------------------------------------------------------------------------------------------- autograd
# torch.library.register_autograd refuses schemas with keyword-only tensors, so the kernels of the Autograd key are
# registered here as it would register them. The Function has a forward(ctx, ...) and no setup_context, which also costs
# a third of the host time.


class _OnceDifferentiable(Function):
    """Identity on `count` gradients, whose derivative is an error. The other tensors are what they depend on."""

    @staticmethod
    def forward(ctx: Any, op: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.op = op
        return tuple(gradient.detach() for gradient in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> NoReturn:
        raise RuntimeError(
            f"syncfree::{ctx.op}: double backward is not supported; its gradients cannot be differentiated"
        )


def _once_differentiable(
    op: str, gradients: Sequence[Tensor | None], anchors: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients themselves, or under create_graph=True gradients that raise when they are differentiated."""
    if not torch.is_grad_enabled():
        return tuple(gradients)
    present = [gradient for gradient in gradients if gradient is not None]
    tracked = [anchor for anchor in anchors if anchor is not None and anchor.requires_grad]
    results = iter(_OnceDifferentiable.apply(op, len(present), *present, *tracked))
    return tuple(None if gradient is None else next(results) for gradient in gradients)


def _scaled(gradient: Tensor, scale: Tensor, row_scale: Tensor) -> Tensor:
    # The factor is applied in the wide dtype: as a 0-D operand beside a bfloat16 tensor it would be rounded first.
    wide = torch.promote_types(gradient.dtype, torch.float32)
    factor = scale.to(wide)
    if row_scale.numel() > 0:
        factor = (factor * row_scale).unsqueeze(1)
    return (gradient.to(wide) * factor).to(gradient.dtype)


def check_not_resharded(op: str, linear_weight: Tensor) -> None:
    """Raise for a saved weight whose memory FSDP has freed since forward; its kernels would read address 0.

    Raises:
        RuntimeError: the storage of linear_weight holds less than the tensor.
    """
    # A traced tensor has no storage to look at.
    if is_traced() or linear_weight.numel() == 0:
        return
    if linear_weight.untyped_storage().nbytes() == 0:
        raise RuntimeError(
            f"syncfree::{op}: linear_weight must still be there when backward computes gradients anew (for reduction "
            "'none', or for a second backward), got one whose memory was freed since forward, as FSDP does when it "
            "reshards; keep it with fully_shard(..., reshard_after_forward=False), or leave set_unshard_in_backward "
            "at True"
        )


class _FlceForward(Function):
    """Autograd of `flce_forward`.

    The gradients that forward computed for an upstream gradient of 1 are kept in `ctx.gradients`, not among the saved
    tensors: the first backward scales them in place and gives them away, and a saved tensor may not change. A later
    backward recomputes from the saved tensors, where the version counter finds inputs that were changed in between. The
    outputs are marked as not differentiable and so do not refer back to ctx: no reference cycle keeps them alive.
    db stays in the accumulator's dtype; autograd casts it to that of its leaf.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        keyset: Any,
        options: dict[str, Any],
        wanted: int | None,
    ) -> tuple[Tensor, ...]:
        op = _syncfree.flce_forward.default
        computed = tuple(below_autograd(op, keyset, input, linear_weight, target, linear_bias, **options))
        outputs = computed[:wanted]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.computed = (options.get("need_dx", False), options.get("need_dw", False), options.get("need_db", False))
        ctx.gradients = computed[5:]
        ctx.save_for_backward(input, linear_weight, target, linear_bias, *map(options.get, _OPTION_TENSORS))
        ctx.options = {
            name: value
            for name, value in options.items()
            if name not in _OPTION_TENSORS and not name.startswith("need_")
        }
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = grad_outputs[0]
        needed = ctx.needs_input_grad[:3]
        if upstream is None or not any(needed):
            return (None,) * 7
        with torch.no_grad():
            kept = ctx.gradients
            if kept is None or any(need and not has for need, has in zip(needed, ctx.computed, strict=True)):
                gradients = _FlceForward._recompute(ctx, upstream, needed)
            elif is_traced() or torch._C._functorch.is_legacy_batchedtensor(upstream):  # no op in place is batched
                gradients = _FlceForward._scale_copies(ctx, upstream, needed)
            else:
                gradients = _FlceForward._give_away(ctx, upstream, needed)
        if torch.is_grad_enabled():
            gradients = _once_differentiable("flce_forward", gradients, (upstream, *ctx.saved_tensors[:4]))
        return (*gradients, None, None, None, None)

    @staticmethod
    def _recompute(ctx: Any, upstream: Tensor, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
        hidden, linear_weight, target, linear_bias, *tensors = ctx.saved_tensors
        check_not_resharded("flce_forward", linear_weight)
        gradients = _syncfree.flce_backward.default(
            upstream,
            hidden,
            linear_weight,
            target,
            linear_bias,
            **dict(zip(_OPTION_TENSORS, tensors, strict=True)),
            **ctx.options,
            need_dx=needed[0],
            need_dw=needed[1],
            need_db=needed[2],
        )
        return tuple(gradient if need else None for gradient, need in zip(gradients, needed, strict=True))

    @staticmethod
    def _scale_copies(ctx: Any, upstream: Tensor, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
        dx, dw, db, dx_scale, dw_scale = ctx.gradients
        no_scale = dx_scale.new_empty((0,))
        return (
            _scaled(dx, upstream, dx_scale) if needed[0] else None,
            _scaled(dw, upstream, dw_scale) if needed[1] else None,
            _scaled(db, upstream, no_scale) if needed[2] else None,
        )

    @staticmethod
    def _give_away(ctx: Any, upstream: Tensor, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
        dx, dw, db, dx_scale, dw_scale = ctx.gradients
        ctx.gradients = None
        gradients = (dx if needed[0] else None, dw if needed[1] else None, db if needed[2] else None)
        row_scales = None
        if torch.float16 in (dx.dtype, dw.dtype):
            all_scales = (dx_scale, dw_scale, dx_scale.new_empty((0,)))
            row_scales = [scale for scale, need in zip(all_scales, needed, strict=True) if need]
        # Nobody has seen these tensors yet, so there is no version to count: straight to the kernel.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            _syncfree.scale_unless_one_.default([g for g in gradients if g is not None], upstream, row_scales)
        return gradients


class _CrossEntropyForward(Function):
    """Autograd of `cross_entropy_forward`. Nothing that is saved is written to, so any backward is like the first."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, keyset: Any, options: dict[str, Any], wanted: int | None
    ) -> tuple[Tensor, ...]:
        op = _syncfree.cross_entropy_forward.default
        computed = tuple(below_autograd(op, keyset, logits, target, **options))
        outputs = computed[:wanted]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.save_for_backward(logits, target, computed[5], *map(options.get, _OPTION_TENSORS))
        ctx.options = {
            name: value
            for name, value in options.items()
            if name not in _OPTION_TENSORS and not name.startswith("need_")
        }
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = grad_outputs[0]
        if upstream is None or not ctx.needs_input_grad[0]:
            return (None,) * 5
        logits, target, row_stats, *tensors = ctx.saved_tensors
        options = dict(zip(_OPTION_TENSORS, tensors, strict=True))
        with torch.no_grad():
            gradient = _syncfree.cross_entropy_backward(upstream, logits, target, row_stats, **options, **ctx.options)
        gradients = _once_differentiable("cross_entropy_forward", (gradient,), (upstream, logits))
        return (*gradients, None, None, None, None)


def _flce_forward_autograd(
    keyset: Any,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    if is_differentiated("flce_forward", input, linear_weight, linear_bias):
        return tuple(_FlceForward.apply(input, linear_weight, linear_bias, target, keyset, options, None))
    op = _syncfree.flce_forward.default
    return tuple(below_autograd(op, keyset, input, linear_weight, target, linear_bias, **options))


def _cross_entropy_forward_autograd(keyset: Any, logits: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, ...]:
    if is_differentiated("cross_entropy_forward", logits):
        return tuple(_CrossEntropyForward.apply(logits, target, keyset, options, None))
    return tuple(below_autograd(_syncfree.cross_entropy_forward.default, keyset, logits, target, **options))


_library.impl("flce_forward", _flce_forward_autograd, "Autograd", with_keyset=True)
_library.impl("cross_entropy_forward", _cross_entropy_forward_autograd, "Autograd", with_keyset=True)


# The gradients of flce_backward and cross_entropy_backward could be differentiated in principle; nothing here does. A
# direct call raises in backward instead of giving wrong zeros.


def _register_once_differentiable(name: str, leaves: int) -> None:
    op = getattr(_syncfree, name).default

    def kernel(keyset: Any, *args: Any, **options: Any) -> Any:
        anchors = args[:leaves]
        result = below_autograd(op, keyset, *args, **options)
        if not is_differentiated(name, *anchors):
            return result
        gradients = (result,) if isinstance(result, Tensor) else tuple(result)
        gradients = _once_differentiable(name, gradients, anchors)
        return gradients[0] if isinstance(result, Tensor) else gradients

    _library.impl(name, kernel, "Autograd", with_keyset=True)


_register_once_differentiable("flce_backward", 3)
_register_once_differentiable("cross_entropy_backward", 2)


def _scale_unless_one_versioned(
    keyset: Any, grads: Sequence[Tensor], scale: Tensor, row_scales: Sequence[Tensor] | None = None
) -> None:
    # A kernel registered from the stable ABI does not count its writes: autograd would use a changed tensor silently.
    torch.autograd.graph.increment_version(grads)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        _syncfree.scale_unless_one_.default.redispatch(
            keyset & torch._C._after_ADInplaceOrView_keyset, grads, scale, row_scales
        )


_library.impl("scale_unless_one_", _scale_unless_one_versioned, "ADInplaceOrView", with_keyset=True)


def _publish_versioned(keyset: Any, slots: Tensor, *args: Any, counters: Tensor | None = None, **options: Any) -> None:
    torch.autograd.graph.increment_version([slots] if counters is None else [slots, counters])
    with torch._C._AutoDispatchBelowADInplaceOrView():
        _syncfree.publish_.default.redispatch(
            keyset & torch._C._after_ADInplaceOrView_keyset, slots, *args, counters=counters, **options
        )


_library.impl("publish_", _publish_versioned, "ADInplaceOrView", with_keyset=True)


# The ops over a slice of the vocabulary have no autograd of their own (integrations/distributed.py has it), and some
# write to arguments.
_SHARD_OPS = tuple(name for name in _CUDA_OPS if name.startswith("flce_shard_"))


def _register_shard_op(name: str) -> None:
    op = getattr(_syncfree, name).default
    written = [
        (i, argument.name)
        for i, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def autograd(keyset: Any, *args: Any, **options: Any) -> Any:
        if is_differentiated(name, *(a for a in (*args, *options.values()) if isinstance(a, Tensor))):
            raise RuntimeError(
                f"syncfree::{name}: autograd is not supported; use "
                "syncfree_ext.integrations.distributed.vocab_parallel_linear_cross_entropy, or torch.no_grad()"
            )
        return below_autograd(op, keyset, *args, **options)

    def versioned(keyset: Any, *args: Any, **options: Any) -> Any:
        tensors = [args[i] if i < len(args) else options.get(argument) for i, argument in written]
        torch.autograd.graph.increment_version([tensor for tensor in tensors if tensor is not None])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **options)

    _library.impl(name, autograd, "Autograd", with_keyset=True)
    if written:
        _library.impl(name, versioned, "ADInplaceOrView", with_keyset=True)


for _name in _SHARD_OPS:
    _register_shard_op(_name)


def _refusing_kernel(name: str) -> Callable[..., NoReturn]:
    def kernel(*_args: Any, **_options: Any) -> NoReturn:
        refuse_transform(name)

    return kernel


# Without a batching rule vmap would loop over the batch.
for _name in (
    "flce",
    "cross_entropy",
    "flce_forward",
    "flce_backward",
    "cross_entropy_forward",
    "cross_entropy_backward",
    "count_targets",
    "scale_unless_one_",
    "publish_",
    "masked_indices",
    *_SHARD_OPS,
):
    _library.impl(_name, _refusing_kernel(_name), "FuncTorchBatched")
