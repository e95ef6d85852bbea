"""Fakes of the ops: the shape, dtype, device and layout of every output, from the same of the inputs.

They hold for symbolic sizes and for any device, so that a graph for CUDA can be built where there is none. Every output
is contiguous; one that was not asked for has shape [0]. A shape that does not fit is a ValueError, as in the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

_Size: TypeAlias = "int | torch.SymInt"


def _accumulator(compute: torch.dtype) -> torch.dtype:
    return torch.float64 if compute == torch.float64 else torch.float32


def _check(op: str, argument: str, expected: str, ok: Any, got: object) -> None:
    torch._check_value(ok, lambda: f"syncfree::{op}: {argument} must have {expected}, got {got}")


def _check_rows(op: str, rows: _Size, target: Tensor, token_weight: Tensor | None) -> None:
    _check(op, "target", f"one entry for each of {rows} rows", target.numel() == rows, tuple(target.shape))
    if token_weight is not None:
        _check(op, "token_weight", "the shape of target", token_weight.numel() == rows, tuple(token_weight.shape))


def _check_linear(
    op: str,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    token_weight: Tensor | None,
) -> None:
    _check(op, "input", "2 dimensions (rows, hidden)", input.dim() == 2, tuple(input.shape))
    _check(op, "linear_weight", "2 dimensions (classes, hidden)", linear_weight.dim() == 2, tuple(linear_weight.shape))
    rows, hidden = input.shape
    classes = linear_weight.shape[0]
    _check(
        op, "linear_weight", f"{hidden} columns, as input", linear_weight.shape[1] == hidden, tuple(linear_weight.shape)
    )
    if linear_bias is not None:
        _check(op, "linear_bias", "1 dimension", linear_bias.dim() == 1, tuple(linear_bias.shape))
        _check(op, "linear_bias", f"{classes} entries", linear_bias.shape[0] == classes, tuple(linear_bias.shape))
    _check_rows(op, rows, target, token_weight)


def _fake_loss_outputs(
    like: Tensor,
    rows: _Size,
    acc: torch.dtype,
    reduction: str,
    need_token_accuracy: bool,
    need_predicted_tokens: bool,
    need_logsumexp: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape: tuple[_Size, ...] = (rows,) if reduction == "none" else ()
    return (
        like.new_empty(shape, dtype=acc),
        like.new_empty(shape, dtype=acc),
        like.new_empty(shape if need_token_accuracy else (0,), dtype=torch.float32),
        like.new_empty((rows if need_predicted_tokens else 0,), dtype=torch.int64),
        like.new_empty((rows if need_logsumexp else 0,), dtype=acc),
    )


def _fake_gradients(
    input: Tensor, linear_weight: Tensor, acc: torch.dtype, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        input.new_empty(input.shape if need_dx else (0,)),
        linear_weight.new_empty(linear_weight.shape if need_dw else (0,)),
        # In the accumulator's dtype whatever linear_bias has: it carries no factor that would protect a float16.
        linear_weight.new_empty((linear_weight.shape[0] if need_db else 0,), dtype=acc),
    )


@torch.library.register_fake("syncfree::flce_forward")
def _(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    compute_dtype: torch.dtype | None = None,
    need_dx: bool = False,
    need_dw: bool = False,
    need_db: bool = False,
    need_token_accuracy: bool = False,
    need_predicted_tokens: bool = False,
    need_logsumexp: bool = False,
    **_options: Any,
) -> tuple[Tensor, ...]:
    _check_linear("flce_forward", input, linear_weight, target, linear_bias, token_weight)
    acc = _accumulator(compute_dtype or input.dtype)
    rows, classes = input.shape[0], linear_weight.shape[0]
    dx_scales = rows if need_dx and input.dtype == torch.float16 else 0
    dw_scales = classes if need_dw and linear_weight.dtype == torch.float16 else 0
    return (
        *_fake_loss_outputs(input, rows, acc, reduction, need_token_accuracy, need_predicted_tokens, need_logsumexp),
        *_fake_gradients(input, linear_weight, acc, need_dx, need_dw, need_db and linear_bias is not None),
        input.new_empty((dx_scales,), dtype=torch.float32),
        input.new_empty((dw_scales,), dtype=torch.float32),
    )


@torch.library.register_fake("syncfree::flce_backward")
def _(
    grad_output: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    token_weight: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    need_dx: bool = False,
    need_dw: bool = False,
    need_db: bool = False,
    **_options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_linear("flce_backward", input, linear_weight, target, linear_bias, token_weight)
    acc = _accumulator(compute_dtype or input.dtype)
    return _fake_gradients(input, linear_weight, acc, need_dx, need_dw, need_db and linear_bias is not None)


@torch.library.register_fake("syncfree::cross_entropy_forward")
def _(
    logits: Tensor,
    target: Tensor,
    *,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    need_token_accuracy: bool = False,
    need_predicted_tokens: bool = False,
    need_logsumexp: bool = False,
    **_options: Any,
) -> tuple[Tensor, ...]:
    _check("cross_entropy_forward", "logits", "2 dimensions (rows, classes)", logits.dim() == 2, tuple(logits.shape))
    rows = logits.shape[0]
    _check_rows("cross_entropy_forward", rows, target, token_weight)
    acc = _accumulator(logits.dtype)
    return (
        *_fake_loss_outputs(logits, rows, acc, reduction, need_token_accuracy, need_predicted_tokens, need_logsumexp),
        logits.new_empty((rows, 4), dtype=acc),
    )


@torch.library.register_fake("syncfree::cross_entropy_backward")
def _(grad_output: Tensor, logits: Tensor, target: Tensor, row_stats: Tensor, **_options: Any) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.register_fake("syncfree::count_targets")
def _(target: Tensor, num_classes: _Size, **_options: Any) -> tuple[Tensor, Tensor]:
    return target.new_empty((8,), dtype=torch.float64), target.new_empty((target.numel(),), dtype=torch.int32)


@torch.library.register_fake("syncfree::scale_unless_one_")
def _(grads: Sequence[Tensor], scale: Tensor, row_scales: Sequence[Tensor] | None = None) -> None:
    return None


@torch.library.register_fake("syncfree::publish_")
def _(
    slots: Tensor, values: Sequence[Tensor], columns: Sequence[int], constants: Sequence[float], **_options: Any
) -> None:
    _check("publish_", "slots", "2 dimensions (rows, 4 + columns)", slots.dim() == 2, tuple(slots.shape))
    total = len(values) + len(constants)
    _check("publish_", "columns", f"one entry for each of {total} scalars", len(columns) == total, len(columns))


@torch.library.register_fake("syncfree::read_slot")
def _(slots: Tensor, ticket: int) -> Tensor:
    return slots.new_empty(slots.shape[1:])


@torch.library.register_fake("syncfree::mapped_slots")
def _(like: Tensor, rows: _Size, width: _Size) -> tuple[Tensor, Tensor]:
    return (
        like.new_empty((rows, width), dtype=torch.int64, device="cpu"),
        like.new_empty((rows, width), dtype=torch.int64),
    )


@torch.library.register_fake("syncfree::masked_indices")
def _(mask: Tensor, size: _Size, *, keys: Tensor | None = None, **_options: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check("masked_indices", "mask", "at least one dimension", mask.dim() >= 1, tuple(mask.shape))
    if keys is not None:
        _check("masked_indices", "keys", "the shape of mask", keys.shape == mask.shape, tuple(keys.shape))
    shape = (*mask.shape[:-1], size)
    return (
        mask.new_empty(shape, dtype=torch.int64),
        mask.new_empty(shape),
        mask.new_empty(mask.shape[:-1], dtype=torch.int64),
    )


def _check_chunk(op: str, rows: _Size, order: Tensor, first_row: _Size, size: _Size) -> None:
    _check(op, "rows", f"one entry for each of {rows} rows", order.numel() == rows, tuple(order.shape))
    _check(op, "the chunk", f"its end within {rows} rows", first_row + size <= rows, first_row + size)


@torch.library.register_fake("syncfree::flce_shard_logits")
def _(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    counts: Tensor,
    rows: Tensor,
    linear_bias: Tensor | None = None,
    *,
    first_row: _Size,
    chunk_rows: _Size,
    token_weight: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "flce_shard_logits"
    _check_linear(op, input, linear_weight, target, linear_bias, token_weight)
    _check_chunk(op, input.shape[0], rows, first_row, chunk_rows)
    acc = _accumulator(linear_weight.dtype)
    return (
        linear_weight.new_empty((chunk_rows, linear_weight.shape[1])),
        linear_weight.new_empty((chunk_rows, _logits_pitch(linear_weight.shape[0], acc)), dtype=acc),
        linear_weight.new_empty((chunk_rows, 4), dtype=acc),
    )


def _logits_pitch(classes: _Size, acc: torch.dtype) -> _Size:
    in_16_bytes = 16 // acc.itemsize
    return (classes + in_16_bytes - 1) // in_16_bytes * in_16_bytes


@torch.library.register_fake("syncfree::flce_shard_gradient")
def _(
    logits: Tensor,
    row_stats: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    counts: Tensor,
    rows: Tensor,
    ce: Tensor,
    z: Tensor,
    logsumexp: Tensor | None = None,
    linear_bias: Tensor | None = None,
    *,
    first_row: _Size,
    token_weight: Tensor | None = None,
    need_gradient: bool = True,
    need_dx: bool = True,
    **_options: Any,
) -> tuple[Tensor, Tensor]:
    op = "flce_shard_gradient"
    _check_rows(op, rows.numel(), target, token_weight)
    _check_chunk(op, rows.numel(), rows, first_row, logits.shape[0])
    _check(op, "row_stats", "one row for each of logits", row_stats.shape[0] == logits.shape[0], tuple(row_stats.shape))
    size = logits.shape[0] if need_gradient and need_dx else 0
    return (
        logits.new_empty((size, linear_weight.shape[1])),
        logits.new_empty((3 if need_gradient else 0,)),
    )


@torch.library.register_fake("syncfree::flce_shard_weight_gradient")
def _(*_args: Any, **_options: Any) -> None:
    return None


@torch.library.register_fake("syncfree::flce_shard_store_dx")
def _(*_args: Any, **_options: Any) -> None:
    return None


# The Hopper path over a slice exists for CUDA alone; whether it takes a call is known where the device is.


@torch.library.register_fake("syncfree::flce_shard_fused_rows")
def _(*_args: Any, **_options: Any) -> int:
    return 0


@torch.library.register_fake("syncfree::flce_shard_fused_begin")
def _(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    counts: Tensor,
    rows: Tensor,
    *,
    chunk_rows: _Size,
    weight_dtype: torch.dtype,
    lean: bool = False,
    need_dw: bool = True,
    **_options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_linear("flce_shard_fused_begin", input, linear_weight, target, None, None)
    n, (classes, hidden) = input.shape[0], linear_weight.shape
    exact = weight_dtype == torch.bfloat16 and not lean
    split = exact and classes % 64 == 0 and hidden % 128 == 0 and (n + chunk_rows - 1) // chunk_rows <= 4096
    return (
        input.new_empty((n,), dtype=torch.float32),
        input.new_empty((4 * n + 2 * classes if need_dw else 0,), dtype=torch.int32),
        input.new_empty(
            (classes, hidden) if need_dw else (0,), dtype=torch.float32 if exact and not split else weight_dtype
        ),
        input.new_empty((classes * hidden if need_dw and split else 0,), dtype=torch.uint8),
    )


@torch.library.register_fake("syncfree::flce_shard_fused_logits")
def _(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    counts: Tensor,
    rows: Tensor,
    target_logits: Tensor,
    *,
    chunk_rows: _Size,
    token_weight: Tensor | None = None,
    need_e: bool = True,
    **_options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_linear("flce_shard_fused_logits", input, linear_weight, target, None, token_weight)
    classes, hidden = linear_weight.shape
    return (
        linear_weight.new_empty((chunk_rows, hidden)),
        linear_weight.new_empty((chunk_rows if need_e else 0, (classes + 63) // 64 * 64)),
        input.new_empty((4, chunk_rows), dtype=torch.float32),
    )


@torch.library.register_fake("syncfree::flce_shard_fused_gradient")
def _(
    e: Tensor,
    slice_stats: Tensor,
    row_stats: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    counts: Tensor,
    rows: Tensor,
    *_outputs: Tensor | None,
    need_dx: bool = True,
    token_weight: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, Tensor]:
    _check_rows("flce_shard_fused_gradient", rows.numel(), target, token_weight)
    size = slice_stats.shape[1]
    return (
        slice_stats.new_empty((size if need_dx else 0, linear_weight.shape[1])),
        slice_stats.new_empty((size,)),
    )


@torch.library.register_fake("syncfree::flce_shard_fused_weight_gradient")
@torch.library.register_fake("syncfree::flce_shard_fused_add_targets")
@torch.library.register_fake("syncfree::flce_shard_fused_store_dx")
def _(*_args: Any, **_options: Any) -> None:
    return None
