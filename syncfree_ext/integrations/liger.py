"""The fused linear cross-entropy under the names, argument orders and outputs of Liger-Kernel.

Code written for Liger changes an import, or keeps it and calls `patch_liger()`:

    from syncfree_ext.integrations.liger import LigerFusedLinearCrossEntropyLoss

What differs, on purpose: nothing waits for the device; gradients do not depend on how often backward is called; the
weight gradient is summed in fp32 unless `accum_dtype` is the dtype of the weight; z_loss is fp32; token accuracy is 0,
not NaN, where every token is ignored; an argument that is wrong is a TypeError or a ValueError. An argument of Liger
that cannot be honoured is refused, never ignored.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from syncfree_ext.functional import LinearCrossEntropyOutput, Number, Reduction, linear_cross_entropy


@dataclass
class CrossEntropyOutput:
    """The loss and what was asked for beside it. While `patch_liger` is on, Liger's own class takes its place."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


_output_class: Any = CrossEntropyOutput


class LigerFusedLinearCrossEntropyFunction:
    """Liger's autograd function as far as its callers see it: `apply`, which is differentiable."""

    # Liger's own functional then passes chunk_mem_const on.
    supports_inner_impl_dispatch = True

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        ce_impl: None = None,
        ce_mode: None = None,
        chunk_mem_const: int = 1,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Compute the loss. Takes 15, 17 or 18 positional arguments, as releases of Liger pass them.

        Args:
            _input: (BT, H), float32, bfloat16 or float16.
            weight: (V, H), in the dtype of _input.
            target: (BT,) or (BT, 1), int64 or int32: class indices, or ignore_index.
            bias: (V,).
            ce_weight: (V,), class weights.
            ignore_index: rows with this target count for nothing.
            lse_square_scale: weight of the penalty on logsumexp², which is inside the loss.
            label_smoothing: in [0, 1].
            reduction: "mean", "sum" or "none".
            softcap: logits become softcap * tanh(logits / softcap).
            return_z_loss: return the penalty as well.
            accum_dtype: None or torch.float32 sum the gradient of weight in fp32, the dtype of weight in that dtype.
            use_token_scaling: multiply the loss of each row by its detached probability of the target.
            return_token_accuracy: return the share of rows whose largest logit is the target's.
            return_predicted_tokens: return the class of each row's largest logit, -1 on ignored rows.
            ce_impl: must be None; there is one implementation.
            ce_mode: must be None.
            chunk_mem_const: how many times Liger's memory for logits is asked for; 1 leaves it to workspace_bytes.

        Returns:
            loss, z_loss, token_accuracy, predicted_tokens; None for what was not asked for. Only loss has a gradient.

        Raises:
            TypeError: as `linear_cross_entropy`.
            ValueError: as `linear_cross_entropy`, and where ce_impl or ce_mode is given.
        """
        name = "LigerFusedLinearCrossEntropyFunction"
        for argument, value in (("ce_impl", ce_impl), ("ce_mode", ce_mode)):
            if value is not None:
                raise ValueError(f"{name}: {argument} must be None, there is one implementation here, got {value!r}")
        out = _loss(
            name,
            _input,
            weight,
            target,
            bias,
            ce_weight,
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            accum_dtype,
            use_token_scaling,
            return_z_loss,
            return_token_accuracy,
            return_predicted_tokens,
            chunk_mem_const,
        )
        return out.loss, out.z_loss, out.token_accuracy, out.predicted_tokens


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Any:
    """Liger's functional form; the arguments are those of `LigerFusedLinearCrossEntropyFunction.apply`.

    Returns:
        The loss, or a CrossEntropyOutput if any return_* is set.
    """
    out = _loss(
        "liger_fused_linear_cross_entropy",
        input,
        weight,
        target,
        bias,
        ce_weight,
        ignore_index,
        lse_square_scale,
        label_smoothing,
        reduction,
        softcap,
        accum_dtype,
        use_token_scaling,
        return_z_loss,
        return_token_accuracy,
        return_predicted_tokens,
        chunk_mem_const,
    )
    return _as_liger(out, return_z_loss or return_token_accuracy or return_predicted_tokens)


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """Liger's module: the options once, and `forward(lin_weight, _input, target, bias=None)`, weight first.

    The options are those of `LigerFusedLinearCrossEntropyFunction.apply`. ce_weight moves with the module and is not in
    its state_dict.

    Raises:
        ValueError: label_smoothing, reduction or softcap is out of its range.
    """

    ce_weight: Tensor | None

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        name = "LigerFusedLinearCrossEntropyLoss"
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"{name}: label_smoothing must be in [0, 1], got {label_smoothing}")
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"{name}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        if softcap is not None and not softcap > 0:
            raise ValueError(f"{name}: softcap must be positive, got {softcap}")
        self.register_buffer("ce_weight", ce_weight, persistent=False)
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction: Reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.accum_dtype = accum_dtype
        self.use_token_scaling = use_token_scaling
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Any:
        """Return the loss, or a CrossEntropyOutput if any return_* is set.

        Args:
            lin_weight: (V, H).
            _input: (BT, H).
            target: (BT,) or (BT, 1), int64 or int32.
            bias: (V,).
        """
        return liger_fused_linear_cross_entropy(
            _input,
            lin_weight,
            target,
            bias,
            self.ce_weight,
            self.ignore_index,
            self.lse_square_scale,
            self.label_smoothing,
            self.reduction,
            self.softcap,
            self.return_z_loss,
            self.accum_dtype,
            self.use_token_scaling,
            self.return_token_accuracy,
            self.return_predicted_tokens,
        )


def fixed_fused_linear_cross_entropy(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    num_items_in_batch: Number | Tensor | None = None,
    ignore_index: int = -100,
    final_logit_softcapping: float | None = None,
    accum_dtype: torch.dtype | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    *,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    use_token_scaling: bool = False,
    chunk_mem_const: int = 1,
) -> Any:
    """The loss of Liger's patched models of transformers, with their divisor applied in forward.

    Liger divides a sum by num_items_in_batch, so that the upstream gradient is never 1 and backward goes over all
    gradients once more. Here it is the divisor of the mean.

    Args:
        hidden_states: (BT, H).
        lm_head_weight: (V, H).
        target: (BT,), shifted already.
        num_items_in_batch: the divisor, a number or a tensor of one element; None: the rows that are not ignored.
        ignore_index: rows with this target count for nothing.
        final_logit_softcapping: the softcap.
        accum_dtype: as in `LigerFusedLinearCrossEntropyFunction.apply`, like all that follow.
        return_token_accuracy: return the token accuracy as well.
        return_predicted_tokens: return the predicted tokens as well.
        bias: (V,).
        ce_weight: (V,), class weights.
        lse_square_scale: weight of the penalty on logsumexp².
        label_smoothing: in [0, 1].
        use_token_scaling: multiply the loss of each row by its detached probability of the target.
        chunk_mem_const: how many times Liger's memory for logits is asked for.

    Returns:
        The loss, or a CrossEntropyOutput if any return_* is set.
    """
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(hidden_states.device, non_blocking=True)
    out = _loss(
        "fixed_fused_linear_cross_entropy",
        hidden_states,
        lm_head_weight,
        target,
        bias,
        ce_weight,
        ignore_index,
        lse_square_scale,
        label_smoothing,
        "mean",
        final_logit_softcapping,
        accum_dtype,
        use_token_scaling,
        False,
        return_token_accuracy,
        return_predicted_tokens,
        chunk_mem_const,
        num_items_in_batch,
    )
    return _as_liger(out, return_token_accuracy or return_predicted_tokens)


def _loss(
    name: str,
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ce_weight: Tensor | None,
    ignore_index: int,
    lse_square_scale: float,
    label_smoothing: float,
    reduction: Reduction,
    softcap: float | None,
    accum_dtype: torch.dtype | None,
    use_token_scaling: bool,
    return_z_loss: bool,
    return_token_accuracy: bool,
    return_predicted_tokens: bool,
    chunk_mem_const: int,
    num_items: Number | Tensor | None = None,
) -> LinearCrossEntropyOutput:
    if isinstance(input, Tensor) and input.dim() != 2:
        raise ValueError(f"{name}: input must have 2 dimensions (rows, hidden), got shape {tuple(input.shape)}")
    if isinstance(target, Tensor) and target.dim() == 2 and target.shape[1] == 1:
        target = target.squeeze(1)
    out = linear_cross_entropy(
        input,
        weight,
        target,
        linear_bias=bias,
        weight=ce_weight,
        num_items=num_items,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        token_scaling=use_token_scaling,
        z_loss_weight=lse_square_scale,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        chunk_rows=_chunk_rows(name, input, weight, chunk_mem_const),
        accum_dtype=accum_dtype,
    )
    return out if isinstance(out, LinearCrossEntropyOutput) else LinearCrossEntropyOutput(out)


def _chunk_rows(name: str, input: Tensor, weight: Tensor, chunk_mem_const: int) -> int | None:
    """The rows of Liger's chunks, whose logits take about chunk_mem_const times the memory of input."""
    if chunk_mem_const == 1:
        return None
    if isinstance(chunk_mem_const, bool) or not isinstance(chunk_mem_const, int) or chunk_mem_const < 1:
        raise ValueError(f"{name}: chunk_mem_const must be an integer of at least 1, got {chunk_mem_const!r}")
    if input.shape[1] == 0 or weight.shape[0] == 0:
        return None
    chunks = -(-weight.shape[0] // (chunk_mem_const * input.shape[1]))
    return max(1, -(-input.shape[0] // chunks))


def _as_liger(out: LinearCrossEntropyOutput, asked: bool) -> Any:
    if not asked:
        return out.loss
    return _output_class(
        loss=out.loss,
        z_loss=out.z_loss,
        token_accuracy=out.token_accuracy,
        predicted_tokens=out.predicted_tokens,
    )


# ------------------------------------------------------------------------------------------------------------ the patch

# Where Liger defines what is exchanged. Not every release has each of them.
_TARGETS = (
    ("liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"),
    ("liger_kernel.ops", "LigerFusedLinearCrossEntropyFunction"),
    ("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
    ("liger_kernel.transformers.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyLoss"),
    ("liger_kernel.transformers.model.loss_utils", "fixed_fused_linear_cross_entropy"),
)


class LigerPatch:
    """What `patch_liger` returns: undoes it by `remove()`, or as a context manager."""

    def __init__(self, bindings: list[tuple[ModuleType, str, Any]], output_class: Any) -> None:
        self.bindings = bindings
        """Module, name and former value of everything that was exchanged."""
        self._output_class = output_class

    def remove(self) -> None:
        """Give every module that was changed its own name back; nothing happens the second time.

        A module that imported one of the names while the patch was on keeps what it imported.
        """
        global _output_class
        if not self.bindings:
            return
        for module, name, former in reversed(self.bindings):
            setattr(module, name, former)
        self.bindings = []
        _output_class = self._output_class

    def __enter__(self) -> LigerPatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def patch_liger() -> LigerPatch:
    """Let an installed Liger-Kernel compute its fused linear cross-entropy here.

    Every module that has imported Liger's function, functional form or module, under whatever name, is bound to those
    of this file, and so is the loss function of Liger's patched models. It therefore serves `use_liger_kernel` of
    transformers' Trainer and other callers of Liger, before or after Liger patches a model. Nothing else of Liger
    changes. A second call changes nothing.

    Returns:
        A handle whose `remove()` undoes it; a context manager that does so at its end.

    Raises:
        ImportError: Liger-Kernel is not installed, or has none of the names.
    """
    global _output_class
    replacements = {}
    for module_name, name in _TARGETS:
        try:
            original = getattr(importlib.import_module(module_name), name)
        except (ModuleNotFoundError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("liger_kernel"):
                raise
            continue
        replacements[id(original)] = (original, globals()[name])
    if not replacements:
        raise ImportError(
            "syncfree_ext.integrations.liger.patch_liger: liger_kernel is not installed, or has none of "
            + ", ".join(sorted({name for _, name in _TARGETS}))
        )
    bindings = []
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__ == __name__:
            continue
        for name, value in list(vars(module).items()):
            original, replacement = replacements.get(id(value), (None, None))
            if original is not None and value is original and value is not replacement:
                bindings.append((module, name, value))
                setattr(module, name, replacement)
    patch = LigerPatch(bindings, _output_class)
    functional = sys.modules.get("liger_kernel.transformers.functional")
    if bindings and functional is not None:
        _output_class = getattr(functional, "CrossEntropyOutput", CrossEntropyOutput)
    return patch
