"""The public functions: argument checks and conveniences over `torch.ops.syncfree`.

The mathematics is the softmax cross-entropy of docs/semantics.md. Neither function waits for the device, in forward or
in backward, under any option; both can be captured in a CUDA graph and traced by torch.compile(fullgraph=True).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from . import _checks
from ._dispatch import make_serializable
from .ops import DEFAULTS, cross_entropy_outputs, flce_outputs

Reduction: TypeAlias = Literal["mean", "sum", "none"]
Number: TypeAlias = "int | float"


class LinearCrossEntropyOutput(NamedTuple):
    """The loss and what was asked for beside it; None stands for what was not.

    "Per row" means the shape of target. Only `loss` has a gradient.
    """

    loss: Tensor
    """float32 (float64 for float64 input): 0-D for "mean" and "sum", per row for "none". Contains the z part."""
    z_loss: Tensor | None = None
    """The part of loss that z_loss_weight added; dtype and shape of loss."""
    token_accuracy: Tensor | None = None
    """float32: the share of valid rows whose largest logit is the target's (0 if none is valid); per row for "none"."""
    predicted_tokens: Tensor | None = None
    """int64, per row: the class of the largest logit, the lowest one of equals; -1 on ignored rows."""
    logsumexp: Tensor | None = None
    """float32 (float64 for float64 input), per row: of the logits after logit_scale and softcap; 0 on ignored rows."""


make_serializable(LinearCrossEntropyOutput)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    num_items: Number | Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    token_scaling: bool = False,
    logit_scale: float | Tensor = 1.0,
    z_loss_weight: float | Tensor = 0.0,
    shift: int = 0,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    return_logsumexp: bool = False,
    chunk_rows: int | None = None,
    workspace_bytes: int | None = None,
    accum_dtype: torch.dtype | None = None,
) -> Tensor | LinearCrossEntropyOutput:
    """Cross-entropy of `input @ linear_weight.T + linear_bias` against target, without ever storing all logits.

    For "mean" and "sum" the gradients of input, linear_weight and linear_bias are computed in forward, each only if it
    is needed, and scaled in backward. A second backward through a retained graph recomputes them. A double backward
    raises.

    Args:
        input: (..., H), float32, bfloat16 or float16, on the CPU also float64; any strides.
        linear_weight: (V, H), in the dtype of input. Under autocast both are cast as by torch.nn.functional.linear, and
            the gradient of a float32 leaf comes from the float32 accumulator.
        target: (...), int64 or int32: class indices, or ignore_index.
        linear_bias: (V,), any floating dtype; read as float32 and never cast by autocast.
        weight: (V,), any floating dtype: class weights, read as float32.
        token_weight: (...), any floating dtype: a factor for each row, aligned with target, read as float32.
        num_items: the divisor of "mean" in place of the number of valid rows (or the sum of their class weights), a
            number or a tensor with one element on the device of input. What is not positive counts as 1. A number
            becomes a tensor through a fill on the device; a CUDA graph bakes it in, so pass a tensor there.
        reduction: "mean", "sum" or "none".
        ignore_index: rows with this target count for nothing. None means -100.
        label_smoothing: in [0, 1].
        softcap: logits become softcap * tanh(logits / softcap).
        token_scaling: multiply each row's loss by its detached probability of the target.
        logit_scale: factor of the logits before softcap. A 0-D tensor does not recompile when it changes.
        z_loss_weight: adds z_loss_weight * logsumexp² to each row's loss. A 0-D tensor does not recompile when it
            changes.
        shift: position t of the last dimension of target scores against target t + shift (and its token_weight); the
            last `shift` positions are ignored. Outputs per row align with input. No copy of input is made.
        return_z_loss: return z_loss as well.
        return_token_accuracy: return token_accuracy as well.
        return_predicted_tokens: return predicted_tokens as well.
        return_logsumexp: return logsumexp as well.
        chunk_rows: how many rows of logits exist at a time; rounded up to 128 on CUDA. None: chosen from the shapes and
            workspace_bytes.
        workspace_bytes: memory for those logits. None: a constant (docs/semantics.md), never a function of free memory.
        accum_dtype: None or torch.float32 add the weight gradient up over chunks in float32, or in its upper 24 bits,
            which rounding the result hides; the dtype of linear_weight adds it up in that dtype, with less memory and
            less accuracy.

    Returns:
        The loss, or, if any return_* is set, a LinearCrossEntropyOutput.

    Raises:
        TypeError: an argument has the wrong type or dtype, or is a DTensor.
        ValueError: a shape, device or value does not fit, or one of weight, token_weight, num_items, logit_scale and
            z_loss_weight requires grad.
        IndexError: on the CPU, a target is outside [0, V) and not ignore_index. On CUDA such a row gives NaN: the loss,
            its row of dX, dW and db are NaN, because raising would wait for the device.
    """
    name = "syncfree_ext.linear_cross_entropy"
    _check_matrix(name, "input", input, linear_weight)
    _checks.check_target(name, target, "input", input)
    classes = linear_weight.shape[0]
    _checks.check_optional_vector(name, "linear_bias", linear_bias, input, (classes,), "one entry for each class", True)
    options = _given_options(
        name,
        input,
        classes,
        target,
        weight,
        token_weight,
        num_items,
        reduction,
        ignore_index,
        label_smoothing,
        softcap,
        token_scaling,
        logit_scale,
        z_loss_weight,
        shift,
    )
    _check_returns(name, return_z_loss, return_token_accuracy, return_predicted_tokens, return_logsumexp)
    if chunk_rows is not None:
        _checks.check_at_least(name, "chunk_rows", chunk_rows, 1)
        options["chunk_rows"] = _checks.plain_number(chunk_rows)
    if workspace_bytes is not None:
        _checks.check_at_least(name, "workspace_bytes", workspace_bytes, 1)
        options["workspace_bytes"] = _checks.plain_number(workspace_bytes)
    if accum_dtype is not None:
        options["accum_dtype"] = accum_dtype

    rows = _as_matrix(input)
    flat_target = _as_sequences(target)
    if not (return_z_loss or return_token_accuracy or return_predicted_tokens or return_logsumexp):
        loss = flce_outputs(rows, linear_weight, flat_target, linear_bias, loss_only=True, **options)[0]
        return _per_row(loss, target, reduction)
    outputs = flce_outputs(
        rows,
        linear_weight,
        flat_target,
        linear_bias,
        **options,
        need_token_accuracy=return_token_accuracy,
        need_predicted_tokens=return_predicted_tokens,
        need_logsumexp=return_logsumexp,
    )
    return _named_outputs(
        outputs, target, reduction, return_z_loss, return_token_accuracy, return_predicted_tokens, return_logsumexp
    )


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    num_items: Number | Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    token_scaling: bool = False,
    logit_scale: float | Tensor = 1.0,
    z_loss_weight: float | Tensor = 0.0,
    shift: int = 0,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    return_logsumexp: bool = False,
) -> Tensor | LinearCrossEntropyOutput:
    """Cross-entropy of logits that the caller owns, with the options of `linear_cross_entropy`.

    The logits are never written to. Their gradient is a fresh tensor in their dtype, computed in backward for any
    upstream gradient; the arithmetic is float32 (float64 for float64 logits). A double backward raises.

    Args:
        logits: (..., V), float32, bfloat16 or float16, on the CPU also float64; any strides.
        target: (...), int64 or int32: class indices, or ignore_index.
        weight: as in `linear_cross_entropy`, like all that follow.
        token_weight: a factor for each row.
        num_items: the divisor of "mean".
        reduction: "mean", "sum" or "none".
        ignore_index: rows with this target count for nothing. None means -100.
        label_smoothing: in [0, 1].
        softcap: logits become softcap * tanh(logits / softcap).
        token_scaling: multiply each row's loss by its detached probability of the target.
        logit_scale: factor of the logits before softcap.
        z_loss_weight: adds z_loss_weight * logsumexp² to each row's loss.
        shift: position t of the last dimension of target scores against target t + shift.
        return_z_loss: return z_loss as well.
        return_token_accuracy: return token_accuracy as well.
        return_predicted_tokens: return predicted_tokens as well.
        return_logsumexp: return logsumexp as well.

    Returns:
        The loss, or, if any return_* is set, a LinearCrossEntropyOutput.

    Raises:
        TypeError: an argument has the wrong type or dtype, or is a DTensor.
        ValueError: a shape, device or value does not fit, or an argument other than logits requires grad.
        IndexError: on the CPU, a target is outside [0, V) and not ignore_index; on CUDA such a row gives NaN.
    """
    name = "syncfree_ext.cross_entropy"
    _check_rows(name, "logits", logits)
    classes = logits.shape[-1]
    if classes == 0:
        raise ValueError(f"{name}: logits must have at least one class, got shape {tuple(logits.shape)}")
    _checks.check_target(name, target, "logits", logits)
    options = _given_options(
        name,
        logits,
        classes,
        target,
        weight,
        token_weight,
        num_items,
        reduction,
        ignore_index,
        label_smoothing,
        softcap,
        token_scaling,
        logit_scale,
        z_loss_weight,
        shift,
    )
    _check_returns(name, return_z_loss, return_token_accuracy, return_predicted_tokens, return_logsumexp)
    rows = _as_matrix(logits)
    flat_target = _as_sequences(target)
    if not (return_z_loss or return_token_accuracy or return_predicted_tokens or return_logsumexp):
        return _per_row(cross_entropy_outputs(rows, flat_target, loss_only=True, **options)[0], target, reduction)
    outputs = cross_entropy_outputs(
        rows,
        flat_target,
        **options,
        need_token_accuracy=return_token_accuracy,
        need_predicted_tokens=return_predicted_tokens,
        need_logsumexp=return_logsumexp,
    )
    return _named_outputs(
        outputs, target, reduction, return_z_loss, return_token_accuracy, return_predicted_tokens, return_logsumexp
    )


def _check_rows(function: str, name: str, rows: Tensor) -> None:
    _checks.check_tensor(function, name, rows)
    _checks.check_floating(function, name, rows)
    if rows.dtype == torch.float64 and rows.device.type == "cuda":
        raise TypeError(f"{function}: {name} must be float32, bfloat16 or float16 on CUDA, got {rows.dtype}")
    if rows.dim() == 0:
        raise ValueError(f"{function}: {name} must have at least one dimension, got shape ()")


def _check_matrix(function: str, name: str, input: Tensor, linear_weight: Tensor) -> None:
    _check_rows(function, name, input)
    _checks.check_tensor(function, "linear_weight", linear_weight)
    _checks.check_floating(function, "linear_weight", linear_weight)
    _checks.check_device(function, "linear_weight", linear_weight, input.device)
    hidden = input.shape[-1]
    shape = tuple(linear_weight.shape)
    if len(shape) != 2:
        raise ValueError(f"{function}: linear_weight must have shape (classes, {hidden}), got {shape}")
    if shape[0] == 0:
        raise ValueError(
            f"{function}: linear_weight must have at least one class, got shape {shape}; gather a sharded weight first"
        )
    if shape[1] != hidden:
        raise ValueError(
            f"{function}: linear_weight must have shape (classes, {hidden}) for {name} of shape {tuple(input.shape)}, "
            f"got {shape}"
        )


def _check_returns(function: str, *flags: object) -> None:
    names = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "return_logsumexp")
    for name, flag in zip(names, flags, strict=True):
        _checks.check_flag(function, name, flag)


# Of the options that both losses have, as the schemas have them.
_LOSS_DEFAULTS = {
    name: DEFAULTS[name]
    for name in (
        "weight",
        "token_weight",
        "num_items",
        "reduction",
        "ignore_index",
        "label_smoothing",
        "softcap",
        "token_scaling",
        "logit_scale",
        "z_loss_weight",
        "shift",
    )
}


def _given_options(
    function: str,
    input: Tensor,
    classes: int,
    target: Tensor,
    weight: Tensor | None,
    token_weight: Tensor | None,
    num_items: Number | Tensor | None,
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
    softcap: float | None,
    token_scaling: bool,
    logit_scale: float | Tensor,
    z_loss_weight: float | Tensor,
    shift: int,
) -> dict[str, Any]:
    """Check the options that both losses have, and give what differs from the ops' defaults in their form.

    Each argument of an op takes host time.
    """
    _checks.check_loss_options(function, target, num_items, reduction, label_smoothing, softcap, shift)
    _checks.check_flag(function, "token_scaling", token_scaling)
    _checks.check_optional_vector(function, "weight", weight, input, (classes,), "one entry for each class", False)
    _checks.check_optional_vector(
        function, "token_weight", token_weight, input, target.shape, "the shape of target", False
    )
    if ignore_index is not None:
        _checks.check_integer(function, "ignore_index", ignore_index)
    options: dict[str, Any] = {}
    if weight is not None:
        options["weight"] = weight
    if token_weight is not None:
        options["token_weight"] = _as_sequences(token_weight)
    if reduction != "mean":
        options["reduction"] = reduction
    if ignore_index is not None:
        options["ignore_index"] = _checks.plain_number(ignore_index)
    if label_smoothing != 0:
        options["label_smoothing"] = _checks.plain_number(label_smoothing)
    if softcap is not None:
        options["softcap"] = _checks.plain_number(softcap)
    if token_scaling is not False:
        options["token_scaling"] = token_scaling
    if shift != 0:
        options["shift"] = _checks.plain_number(shift)
    if isinstance(num_items, Tensor):
        _checks.check_scalar_tensor(function, "num_items", num_items, input.device)
        options["num_items"] = num_items
    elif num_items is not None:
        _checks.check_number(function, "num_items", num_items)
        options["num_items"] = _fill(_checks.plain_number(num_items), input.device)
    for name, value, default in (("logit_scale", logit_scale, 1.0), ("z_loss_weight", z_loss_weight, 0.0)):
        if isinstance(value, Tensor):
            _checks.check_scalar_tensor(function, name, value, input.device)
            options[f"{name}_tensor"] = value
        elif type(value) is not float or value != default:
            _checks.check_number(function, name, value)
            options[name] = _checks.plain_number(value)
    return options


def _fill(value: Number, device: torch.device) -> Tensor:
    """A float64 scalar whose value travels as an argument of the kernel: torch.tensor(value, device=...) uploads it."""
    if torch.compiler.is_compiling():  # full would make a constant of the value, and each value compile anew
        return torch.ones((), dtype=torch.float64, device=device) * value
    # float() would make a number of a symbol.
    return torch.full((), float(value) if type(value) is int else value, dtype=torch.float64, device=device)


def _loss_options(*arguments: Any) -> dict[str, Any]:
    """What `_given_options` gives of the same arguments, with the defaults of all else."""
    return {**_LOSS_DEFAULTS, **_given_options(*arguments)}


def _as_matrix(rows: Tensor) -> Tensor:
    """(..., H) as (rows, H); a view wherever the strides allow one."""
    if rows.dim() == 2:
        return rows
    return rows.unsqueeze(0) if rows.dim() == 1 else rows.flatten(0, -2)


def _as_sequences(per_row: Tensor) -> Tensor:
    """(..., T) as (B, T), the form in which the ops read what is aligned with target."""
    if per_row.dim() == 0:
        return per_row.unsqueeze(0)
    return per_row.flatten(0, -2) if per_row.dim() > 2 else per_row


def _per_row(value: Tensor, target: Tensor, reduction: str) -> Tensor:
    return value.reshape(target.shape) if reduction == "none" else value


def _named_outputs(
    outputs: tuple[Tensor, ...],
    target: Tensor,
    reduction: str,
    z_loss: bool,
    token_accuracy: bool,
    predicted_tokens: bool,
    logsumexp: bool,
) -> LinearCrossEntropyOutput:
    return LinearCrossEntropyOutput(
        loss=_per_row(outputs[0], target, reduction),
        z_loss=_per_row(outputs[1], target, reduction) if z_loss else None,
        token_accuracy=_per_row(outputs[2], target, reduction) if token_accuracy else None,
        predicted_tokens=outputs[3].reshape(target.shape) if predicted_tokens else None,
        logsumexp=outputs[4].reshape(target.shape) if logsumexp else None,
    )
