"""Modules over `linear_cross_entropy`: a loss that owns no weight, and a head that owns it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .functional import LinearCrossEntropyOutput, Number, Reduction, linear_cross_entropy

_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(linear_cross_entropy).parameters.items()
    if parameter.default is not inspect.Parameter.empty
}


class FusedLinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` with its options set once. The weight of the linear layer is an argument of forward.

    The options are those of `linear_cross_entropy`. The class weights `weight`, and logit_scale and z_loss_weight where
    they are tensors, are buffers: they move with the module; the last two are not saved in its state_dict. Change a
    scheduled logit_scale or z_loss_weight in place (`loss.z_loss_weight.fill_(...)`): a compiled model does not
    recompile for it.

    Shapes: input (..., H); linear_weight (V, H); target (...); linear_bias (V,). Errors as there; never waits.
    """

    weight: Tensor | None
    logit_scale: float | Tensor
    z_loss_weight: float | Tensor

    def __init__(
        self,
        weight: Tensor | None = None,
        reduction: Reduction = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        *,
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
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.token_scaling = token_scaling
        _set_scalar(self, "logit_scale", logit_scale)
        _set_scalar(self, "z_loss_weight", z_loss_weight)
        self.shift = shift
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens
        self.return_logsumexp = return_logsumexp
        self.chunk_rows = chunk_rows
        self.workspace_bytes = workspace_bytes
        self.accum_dtype = accum_dtype

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None = None,
        *,
        token_weight: Tensor | None = None,
        num_items: Number | Tensor | None = None,
    ) -> Tensor | LinearCrossEntropyOutput:
        """Return the loss, or a LinearCrossEntropyOutput if a return_* option is set.

        Args:
            input: (..., H), the hidden states.
            linear_weight: (V, H), in the dtype of input unless autocast is on.
            target: (...), int64 or int32.
            linear_bias: (V,).
            token_weight: (...), a factor for each row.
            num_items: the divisor of "mean", a number or a tensor with one element on the device.
        """
        return linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=self.weight,
            token_weight=token_weight,
            num_items=num_items,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            token_scaling=self.token_scaling,
            logit_scale=self.logit_scale,
            z_loss_weight=self.z_loss_weight,
            shift=self.shift,
            return_z_loss=self.return_z_loss,
            return_token_accuracy=self.return_token_accuracy,
            return_predicted_tokens=self.return_predicted_tokens,
            return_logsumexp=self.return_logsumexp,
            chunk_rows=self.chunk_rows,
            workspace_bytes=self.workspace_bytes,
            accum_dtype=self.accum_dtype,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedLinearCrossEntropyLoss:
        # Options follow the module to a device but keep their dtype: half() would make 0 of a z_loss_weight of 1e-8.
        kept = dict(self.named_buffers(recurse=False, remove_duplicate=False))
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = getattr(self, name)
            if after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        return self

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        options = []
        for name, default in _DEFAULTS.items():
            value = getattr(self, name, default)
            if isinstance(value, Tensor):
                options.append(f"{name}=tensor{tuple(value.shape)}")
            elif value != default:
                options.append(f"{name}={value!r}")
        return ", ".join(options)


class LinearCrossEntropyHead(nn.Linear):
    """The last linear layer of a classifier or language model, with its loss.

    `head(hidden, target)` is the loss, `head(hidden)` the logits. It is a Linear: the same parameters, initialisation
    and state_dict, so it can take the place of a model's lm_head. Tie it to an embedding by assigning
    `head.weight = embedding.weight`; the gradients of both uses add up as usual.

    Args:
        in_features: H, the size of a hidden state.
        out_features: V, the number of classes.
        bias: whether there is a bias.
        device: of the parameters.
        dtype: of the parameters.
        loss: the options of the loss; None means FusedLinearCrossEntropyLoss().
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        loss: FusedLinearCrossEntropyLoss | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.loss = FusedLinearCrossEntropyLoss() if loss is None else loss

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        target: Tensor | None = None,
        *,
        token_weight: Tensor | None = None,
        num_items: Number | Tensor | None = None,
    ) -> Tensor | LinearCrossEntropyOutput:
        """Return the loss of the logits of input against target, or the logits (..., V) if there is no target.

        Args:
            input: (..., H), the hidden states.
            target: (...), int64 or int32.
            token_weight: (...), a factor for each row.
            num_items: the divisor of "mean", a number or a tensor with one element on the device.

        Raises:
            ValueError: token_weight or num_items without target.
        """
        if target is None:
            if token_weight is not None or num_items is not None:
                raise ValueError("LinearCrossEntropyHead: token_weight and num_items need a target, got target=None")
            return super().forward(input)
        loss: Tensor | LinearCrossEntropyOutput = self.loss(
            input, self.weight, target, self.bias, token_weight=token_weight, num_items=num_items
        )
        return loss


def _set_scalar(module: nn.Module, name: str, value: float | Tensor) -> None:
    if isinstance(value, Tensor):
        module.register_buffer(name, value, persistent=False)
    else:
        setattr(module, name, value)
