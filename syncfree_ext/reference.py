"""The loss as plain PyTorch: the executable form of docs/semantics.md, for tests and for reading.

Two ways to the gradients, so that one can check the other:

* `linear_cross_entropy` and `cross_entropy` take the public arguments and are differentiable by autograd.
* `linear_cross_entropy_gradients` and `cross_entropy_gradients` evaluate the closed formulas, a block of rows at a
  time, so that full-size problems fit in memory.

`count_targets` and `scale_unless_one_` do what the ops of these names do.

Everything here waits for the device and writes all logits of a block. Arithmetic is in float64 for float64 inputs and
in float32 for others; `dtype` overrides it in the closed forms. A target out of range raises IndexError on the CPU and
gives NaN on CUDA, as in the library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Gradients",
    "Output",
    "count_targets",
    "cross_entropy",
    "cross_entropy_gradients",
    "linear_cross_entropy",
    "linear_cross_entropy_gradients",
    "scale_unless_one_",
]

_INTEGERS = (torch.int64, torch.int32)
_DEFAULTS: dict[str, Any] = {
    "weight": None,
    "token_weight": None,
    "num_items": None,
    "reduction": "mean",
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "softcap": None,
    "token_scaling": False,
    "logit_scale": 1.0,
    "z_loss_weight": 0.0,
    "shift": 0,
}


class Output(NamedTuple):
    """The loss and its extras; None for those that were not asked for."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None
    logsumexp: Tensor | None = None


class Gradients(NamedTuple):
    """Gradients by the closed formulas, with what a tolerance for them is derived from.

    `dx` [BT, H], `dw` [V, H], `db` [V]; of `cross_entropy_gradients` `dx` is the gradient of the logits [BT, V] and the
    others are None. `dx_noise`, `dw_noise`, `db_noise`: the expected L2 norm of the error of that gradient if each
    element of the logit gradient had an independent relative error of 1. `logit_max`: the largest finite |s|.
    """

    output: Output
    dx: Tensor
    dw: Tensor | None
    db: Tensor | None
    dx_noise: float
    dw_noise: float
    db_noise: float
    logit_max: float


@dataclass(frozen=True)
class _Problem:
    """The arguments by rows. `rows` are the indices of the N scored rows; `target`, `multiplier` belong to these."""

    shape: torch.Size
    classes: int
    rows: Tensor
    target: Tensor
    in_range: Tensor
    multiplier: Tensor
    weight: Tensor
    total_weight: Tensor
    weighted: bool
    inv_ce: Tensor
    inv_z: Tensor
    reduction: str
    smoothing: float
    softcap: float | None
    token_scaling: bool
    logit_scale: Tensor
    z_weight: Tensor
    has_z: bool

    def block(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.target[first:last], self.in_range[first:last], self.multiplier[first:last]


def _require(condition: bool, function: str, argument: str, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"{function}: {argument} must be {expected}, got {got}")


def _aligned(values: Tensor, shift: int, filler: float) -> Tensor:
    """Row t takes the value of row t + shift of its sequence (last dimension); the last `shift` rows take `filler`."""
    if shift == 0:
        return values.reshape(-1)
    out = torch.full_like(values, filler, memory_format=torch.contiguous_format)
    if shift < values.shape[-1]:
        out[..., :-shift] = values[..., shift:]
    return out.reshape(-1)


def _problem(
    function: str,
    classes: int,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    target: Tensor,
    *,
    weight: Tensor | None,
    token_weight: Tensor | None,
    num_items: float | Tensor | None,
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
    softcap: float | None,
    token_scaling: bool,
    logit_scale: float | Tensor,
    z_loss_weight: float | Tensor,
    shift: int,
) -> _Problem:
    if target.dtype not in _INTEGERS:
        raise TypeError(f"{function}: target must be int64 or int32, got {target.dtype}")
    _require(classes >= 1, function, "linear_weight", "of at least one class", classes)
    _require(target.shape == shape, function, "target", f"of shape {tuple(shape)}", tuple(target.shape))
    _require(reduction in ("mean", "sum", "none"), function, "reduction", "'mean', 'sum' or 'none'", repr(reduction))
    _require(
        num_items is None or reduction == "mean", function, "num_items", "None unless reduction is 'mean'", num_items
    )
    _require(0 <= label_smoothing <= 1, function, "label_smoothing", "in [0, 1]", label_smoothing)
    _require(softcap is None or softcap > 0, function, "softcap", "> 0", softcap)
    _require(shift >= 0, function, "shift", ">= 0", shift)
    for name, value in (("weight", weight), ("token_weight", token_weight)):
        _require(
            value is None or not value.requires_grad, function, name, "without requires_grad", "requires_grad=True"
        )
    _require(weight is None or weight.shape == (classes,), function, "weight", f"of shape ({classes},)", weight)
    _require(
        token_weight is None or token_weight.shape == shape, function, "token_weight", "of target's shape", token_weight
    )

    ignore = -100 if ignore_index is None else ignore_index
    if target.dim() == 0:
        target = target.reshape(1)
    aligned = _aligned(target.long(), shift, ignore)
    rows = (aligned != ignore).nonzero()[:, 0]
    chosen = aligned[rows]
    in_range = (chosen >= 0) & (chosen < classes)
    if device.type == "cpu" and not bool(in_range.all()):
        bad = int(chosen[~in_range][0])
        raise IndexError(f"{function}: target must be in [0, {classes}) or ignore_index {ignore}, got {bad}")
    chosen = torch.where(in_range, chosen, 0)
    weights = torch.ones(classes, dtype=dtype, device=device) if weight is None else weight.to(dtype)
    multiplier = torch.ones(len(rows), dtype=dtype, device=device)
    if token_weight is not None:
        multiplier = _aligned(token_weight.detach().reshape(target.shape).to(dtype), shift, 0.0)[rows]
    inv_ce, inv_z = _reciprocals(len(rows), weights[chosen].sum(), reduction, num_items, weight is not None, weights)
    return _Problem(
        shape=shape,
        classes=classes,
        rows=rows,
        target=chosen,
        in_range=in_range,
        multiplier=multiplier,
        weight=weights,
        total_weight=weights.sum(),
        weighted=weight is not None,
        inv_ce=inv_ce,
        inv_z=inv_z,
        reduction=reduction,
        smoothing=float(label_smoothing),
        softcap=softcap,
        token_scaling=token_scaling,
        logit_scale=torch.as_tensor(logit_scale, dtype=dtype, device=device).detach().reshape(()),
        z_weight=torch.as_tensor(z_loss_weight, dtype=dtype, device=device).detach().reshape(()),
        has_z=isinstance(z_loss_weight, Tensor) or z_loss_weight != 0,
    )


def _reciprocals(
    n: int, d: Tensor, reduction: str, num_items: float | Tensor | None, weighted: bool, like: Tensor
) -> tuple[Tensor, Tensor]:
    """1/divisor of the cross-entropy part and of the z part; 0 without scored rows, NaN where D = 0 with some."""
    one = like.new_ones(())
    if n == 0:
        return 0 * one, 0 * one
    if reduction != "mean":
        return one, one
    if num_items is not None:
        items = torch.as_tensor(num_items, dtype=like.dtype, device=like.device).detach().reshape(())
        inverse = torch.where(items <= 0, one, 1 / items)
        return inverse, inverse
    if not weighted:
        return one / n, one / n
    return torch.where(d == 0, one * math.nan, 1 / d), one / n


def _cap(s: Tensor, softcap: float | None) -> Tensor:
    return s if softcap is None else softcap * torch.tanh(s / softcap)


def _log_ratio_of_others(logits: Tensor, target: Tensor) -> Tensor:
    """The logsumexp of the classes other than the target's, minus the target's logit.

    From it come lse − l_t = log(1 + e^x) and 1 − p_t = sigmoid(x) without a difference of nearly equal numbers.
    """
    others = logits.scatter(1, target[:, None], -math.inf)
    top = others.detach().amax(1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0.0)
    total = (others - top).exp().sum(1)
    # Both `where`s keep autograd from 0/0 where the sum is 0.
    log_total = torch.where(total == 0, -math.inf, torch.where(total == 0, 1.0, total).log())
    return log_total + top[:, 0] - logits.gather(1, target[:, None])[:, 0]


def _row_parts(
    p: _Problem, logits: Tensor, target: Tensor, in_range: Tensor, multiplier: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(cross-entropy part, z part, row multiplier, logsumexp, log ratio of the others) of rows of final logits."""
    ratio = _log_ratio_of_others(logits, target)
    nll = torch.logaddexp(ratio, torch.zeros_like(ratio))
    lse = torch.logsumexp(logits, 1)
    own = p.weight[target]
    ce = (1 - p.smoothing) * own * nll if p.smoothing < 1 else torch.zeros_like(nll)
    if p.smoothing > 0:
        ce = ce + p.smoothing / p.classes * (p.weight * (lse[:, None] - logits)).sum(1)
    z = p.z_weight * lse.square() if p.has_z else torch.zeros_like(lse)
    row = multiplier * (-nll).exp().detach() if p.token_scaling else multiplier
    row = torch.where(in_range, row, math.nan)
    return ce, z, row, lse, ratio


def _argmax(logits: Tensor) -> Tensor:
    """The lowest index of the largest logit."""
    classes = torch.arange(logits.shape[1], device=logits.device)
    top = logits == logits.amax(1, keepdim=True)
    return torch.where(top, classes, logits.shape[1]).amin(1).clamp_(max=logits.shape[1] - 1)


def _output(
    p: _Problem,
    ce: Tensor,
    z: Tensor,
    lse: Tensor,
    predicted: Tensor,
    return_z_loss: bool,
    return_token_accuracy: bool,
    return_predicted_tokens: bool,
    return_logsumexp: bool,
) -> Output:
    """From the undivided parts of the scored rows to what the caller gets."""

    def spread(values: Tensor, filler: float = 0) -> Tensor:
        out = values.new_full((p.shape.numel(),), filler)
        return out.index_put((p.rows,), values).reshape(p.shape)

    ce, z = ce * p.inv_ce, z * p.inv_z
    hits = (predicted == p.target).float() * p.in_range
    if p.reduction == "none":
        loss, z_loss, accuracy = spread(ce + z), spread(z), spread(hits)
    else:
        loss, z_loss, accuracy = ce.sum() + z.sum(), z.sum(), hits.sum() / max(len(hits), 1)
    return Output(
        loss,
        z_loss.detach() if return_z_loss else None,
        accuracy if return_token_accuracy else None,
        spread(predicted, -1) if return_predicted_tokens else None,
        spread(lse.detach()) if return_logsumexp else None,
    )


def _unwrap(output: Output) -> Tensor | Output:
    return output.loss if all(extra is None for extra in output[1:]) else output


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    num_items: float | Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
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
) -> Tensor | Output:
    """Cross-entropy of `input @ linear_weight.T + linear_bias`, differentiable by autograd in these three.

    Args:
        input: (..., H), any floating dtype.
        linear_weight: (V, H).
        target: (...), int64 or int32.
        linear_bias: (V,).
        weight: (V,) class weights.
        token_weight: (...), multiplies the loss of a row.
        num_items: divisor of "mean".
        reduction: "mean", "sum" or "none".
        ignore_index: rows with this target are not scored; None means -100.
        label_smoothing: in [0, 1].
        softcap: bounds the logits to (-softcap, softcap).
        token_scaling: multiplies the loss of a row by its probability of the target, without a gradient.
        logit_scale: multiplies the logits.
        z_loss_weight: weight of the squared logsumexp.
        shift: (b, t) is scored against target[b, t + shift].
        return_z_loss: also return the z part of the loss.
        return_token_accuracy: also return the share of rows whose argmax is the target.
        return_predicted_tokens: also return the argmax.
        return_logsumexp: also return the logsumexp of each row.
        chunk_rows: accepted and ignored, as the two that follow.
        workspace_bytes: ignored.
        accum_dtype: ignored.

    Returns:
        The loss, or `Output` if any extra was asked for. float32, or float64 for float64 input.
    """
    function = "linear_cross_entropy"
    del workspace_bytes, accum_dtype
    _require(chunk_rows is None or chunk_rows >= 1, function, "chunk_rows", ">= 1", chunk_rows)
    _check_linear(function, input, linear_weight, linear_bias)
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    with torch.autocast(input.device.type, enabled=False):
        p = _problem(
            function,
            linear_weight.shape[0],
            input.shape[:-1],
            dtype,
            input.device,
            target,
            weight=weight,
            token_weight=token_weight,
            num_items=num_items,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            softcap=softcap,
            token_scaling=token_scaling,
            logit_scale=logit_scale,
            z_loss_weight=z_loss_weight,
            shift=shift,
        )
        products = input.reshape(-1, input.shape[-1])[p.rows].to(dtype) @ linear_weight.to(dtype).T
        if linear_bias is not None:
            products = products + linear_bias.to(dtype)
        return _finish(p, products, return_z_loss, return_token_accuracy, return_predicted_tokens, return_logsumexp)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    num_items: float | Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
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
) -> Tensor | Output:
    """The same loss of logits (..., V), differentiable by autograd in them. Arguments as in `linear_cross_entropy`."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    with torch.autocast(logits.device.type, enabled=False):
        p = _problem(
            "cross_entropy",
            logits.shape[-1],
            logits.shape[:-1],
            dtype,
            logits.device,
            target,
            weight=weight,
            token_weight=token_weight,
            num_items=num_items,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            softcap=softcap,
            token_scaling=token_scaling,
            logit_scale=logit_scale,
            z_loss_weight=z_loss_weight,
            shift=shift,
        )
        rows = logits.reshape(-1, logits.shape[-1])[p.rows].to(dtype)
        return _finish(p, rows, return_z_loss, return_token_accuracy, return_predicted_tokens, return_logsumexp)


def _check_linear(function: str, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> None:
    _require(linear_weight.dim() == 2, function, "linear_weight", "2-D (classes, hidden)", tuple(linear_weight.shape))
    _require(input.dim() >= 1, function, "input", "at least 1-D", tuple(input.shape))
    hidden, classes = input.shape[-1], linear_weight.shape[0]
    _require(
        linear_weight.shape[1] == hidden,
        function,
        "linear_weight",
        f"of shape (classes, {hidden})",
        tuple(linear_weight.shape),
    )
    if linear_bias is not None:
        _require(
            linear_bias.shape == (classes,), function, "linear_bias", f"of shape ({classes},)", tuple(linear_bias.shape)
        )


def _finish(p: _Problem, products: Tensor, *wanted: bool) -> Tensor | Output:
    logits = _cap(p.logit_scale * products, p.softcap)
    ce, z, row, lse, _ = _row_parts(p, logits, p.target, p.in_range, p.multiplier)
    return _unwrap(_output(p, ce * row, z * row, lse, _argmax(logits.detach()), *wanted))


def _block_gradient(
    p: _Problem, products: Tensor, first: int, upstream: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradient of `products` (x W^T + b of rows `first`...), and (ce, z, lse, argmax) of these rows."""
    target, in_range, multiplier = p.block(first, first + len(products))
    s = p.logit_scale * products
    logits = _cap(s, p.softcap)
    ce, z, row, lse, ratio = _row_parts(p, logits, target, in_range, multiplier)
    at, own, spread = target[:, None], p.weight[target], p.smoothing / p.classes
    keep = (1 - p.smoothing) * own
    slope = keep + spread * p.total_weight
    probability = (logits - lse[:, None]).exp()
    hit = torch.sigmoid(-ratio)
    z_slope = 2 * p.z_weight * lse if p.has_z else torch.zeros_like(lse)
    g = p.inv_ce * (slope[:, None] * probability - spread * p.weight) + p.inv_z * z_slope[:, None] * probability
    own_g = p.inv_ce * (spread * (p.total_weight * hit - own) - keep * torch.sigmoid(ratio)) + p.inv_z * z_slope * hit
    g.scatter_(1, at, own_g[:, None])
    g *= (row * upstream[first : first + len(products)] * p.logit_scale)[:, None]
    if p.softcap is not None:
        q = (-2 * s.abs() / p.softcap).exp()
        g *= 4 * q / (1 + q).square()
    return g, ce * row, z * row, lse, _argmax(logits)


def _upstream_rows(p: _Problem, grad_output: Tensor | float | None, like: Tensor) -> Tensor:
    upstream = torch.as_tensor(1.0 if grad_output is None else grad_output, dtype=like.dtype, device=like.device)
    if p.reduction == "none" and upstream.dim() > 0:
        return upstream.reshape(-1)[p.rows]
    return upstream.reshape(()).expand(len(p.rows))


@torch.no_grad()
def linear_cross_entropy_gradients(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    grad_output: Tensor | float | None = None,
    dtype: torch.dtype = torch.float64,
    block_rows: int = 256,
    **options: Any,
) -> Gradients:
    """Loss, all extras and the three gradients by the closed formulas, with at most block_rows x V logits in memory.

    Args:
        input: (..., H).
        linear_weight: (V, H).
        target: (...).
        linear_bias: (V,) or None.
        grad_output: upstream gradient: a scalar, or for reduction "none" a tensor of target's shape; None means 1.
        dtype: of the arithmetic and of the results.
        block_rows: rows of logits at a time.
        **options: those of `linear_cross_entropy` that change the result.
    """
    function = "linear_cross_entropy"
    _check_linear(function, input, linear_weight, linear_bias)
    p = _problem(
        function,
        linear_weight.shape[0],
        input.shape[:-1],
        dtype,
        input.device,
        target,
        **{**_DEFAULTS, **options},
    )
    x, w = input.reshape(-1, input.shape[-1]), linear_weight.to(dtype)
    dx, dw, db = x.new_zeros(x.shape, dtype=dtype), torch.zeros_like(w), w.new_zeros(len(w))
    upstream = _upstream_rows(p, grad_output, w)
    w_norms = w.square().sum(1)
    noise = w.new_zeros(3)
    top, parts = 0.0, []
    for first in range(0, len(p.rows), block_rows):
        rows = p.rows[first : first + block_rows]
        xb = x[rows].to(dtype)
        products = xb @ w.T
        if linear_bias is not None:
            products += linear_bias.to(dtype)
        scaled = (p.logit_scale * products).abs()
        top = max(top, float(torch.where(scaled.isfinite(), scaled, 0).max()))
        g, *rest = _block_gradient(p, products, first, upstream)
        parts.append(rest)
        dx[rows] = g @ w
        dw.addmm_(g.T, xb)
        db += g.sum(0)
        g.square_()
        by_row = g.sum(1)
        noise += torch.stack([g.sum(0) @ w_norms, by_row @ xb.square().sum(1), by_row.sum()])
    dx_noise, dw_noise, db_noise = noise.sqrt().tolist()
    return Gradients(_joined(p, parts, w), dx, dw, db, dx_noise, dw_noise, db_noise, top)


@torch.no_grad()
def cross_entropy_gradients(
    logits: Tensor,
    target: Tensor,
    *,
    grad_output: Tensor | float | None = None,
    dtype: torch.dtype = torch.float64,
    block_rows: int = 256,
    **options: Any,
) -> Gradients:
    """As `linear_cross_entropy_gradients`, for logits (..., V); `dx` is the gradient of the logits, [rows, V]."""
    p = _problem(
        "cross_entropy",
        logits.shape[-1],
        logits.shape[:-1],
        dtype,
        logits.device,
        target,
        **{**_DEFAULTS, **options},
    )
    flat = logits.reshape(-1, logits.shape[-1])
    dx = flat.new_zeros(flat.shape, dtype=dtype)
    upstream = _upstream_rows(p, grad_output, dx)
    top, parts = 0.0, []
    for first in range(0, len(p.rows), block_rows):
        rows = p.rows[first : first + block_rows]
        products = flat[rows].to(dtype)
        scaled = (p.logit_scale * products).abs()
        top = max(top, float(torch.where(scaled.isfinite(), scaled, 0).max()))
        dx[rows], *rest = _block_gradient(p, products, first, upstream)
        parts.append(rest)
    noise = float(dx.norm())
    return Gradients(_joined(p, parts, dx), dx, None, None, noise, 0.0, 0.0, top)


def _joined(p: _Problem, parts: Sequence[Sequence[Tensor]], like: Tensor) -> Output:
    if parts:
        ce, z, lse, predicted = (torch.cat(column) for column in zip(*parts, strict=True))
    else:
        ce = z = lse = like.new_empty(0)
        predicted = p.rows.new_empty(0)
    return _output(p, ce, z, lse, predicted, True, True, True, True)


def count_targets(
    target: Tensor,
    num_classes: int,
    *,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    num_items: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    shift: int = 0,
) -> tuple[Tensor, Tensor]:
    """What the op of this name returns: `counts` float64 [8] and `rows` int32 [BT].

    counts: N, D, C, 1/divisor of the cross-entropy part, 1/divisor of the z part, largest |class weight|, largest
    |token weight| of the scored rows (1 where there is none to read), 0. rows: the scored rows in order, then the
    ignored ones in order. Targets out of range count as scored, with a class weight of NaN (on the CPU: IndexError).
    """
    aligned = _aligned(target.long(), shift, ignore_index)
    valid = aligned != ignore_index
    chosen = aligned[valid]
    in_range = (chosen >= 0) & (chosen < num_classes)
    if target.device.type == "cpu" and not bool(in_range.all()):
        bad = int(chosen[~in_range][0])
        raise IndexError(
            f"count_targets: target must be in [0, {num_classes}) or ignore_index {ignore_index}, got {bad}"
        )
    n = chosen.numel()
    weights = torch.ones(num_classes, dtype=torch.float64, device=target.device) if weight is None else weight.double()
    own = torch.where(in_range, weights[torch.where(in_range, chosen, 0)], math.nan if weight is not None else 1.0)
    inv_ce, inv_z = _reciprocals(n, own.sum(), reduction, num_items, weight is not None, weights)
    largest = weights.new_ones(())
    if token_weight is not None and token_weight.numel():
        multipliers = _aligned(token_weight.double(), shift, 0.0)[valid].abs()
        largest = multipliers.max() if n else weights.new_zeros(())
    zero = weights.new_zeros(())
    counts = torch.stack([zero + n, own.sum(), weights.sum(), inv_ce, inv_z, weights.abs().max(), largest, zero])
    rows = torch.cat([valid.nonzero()[:, 0], (~valid).nonzero()[:, 0]])
    return counts, rows.int()


@torch.no_grad()
def scale_unless_one_(grads: Sequence[Tensor], scale: Tensor, row_scales: Sequence[Tensor] = ()) -> None:
    """Multiplies grads[i] by scale, and by row_scales[i] along dimension 0 where that is not empty, rounding once."""
    for i, grad in enumerate(grads):
        dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
        factor = scale.reshape(()).to(dtype)
        if len(row_scales) and row_scales[i].numel():
            factor = (factor * row_scales[i].to(dtype)).reshape(grad.shape[:1] + (1,) * (grad.dim() - 1))
        grad.copy_(torch.where(factor == 1, grad, (grad.to(dtype) * factor).to(grad.dtype)))
