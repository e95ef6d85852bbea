"""The ops of the Hopper path over a slice of the vocabulary in plain PyTorch, for the CPU.

Importing this gives the CPU these ops, so that the driver between them is tested without a GPU. Numbers are rounded
where the kernels round them: E and v x to bfloat16, sums and factors of a row to float32, dW to what holds it, once a
chunk. The sums within a product are exact.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

ROW_GROUP = 256
TARGET_EXPONENT, LARGEST_SUM, LARGEST_SCALED_SUM = 40.0, 2.0**60, 2.0**20
LOG2_E = 1 / math.log(2)

_library = torch.library.Library("syncfree", "IMPL")


def _chunk(counts: Tensor, order: Tensor, first_row: int, size: int) -> tuple[slice, Tensor, Tensor]:
    """Positions of the live rows of a chunk, these rows, and the ignored rows that the other slots stand for."""
    n, index = int(counts[0]), first_row // size
    chunks = -(-n // size)
    even = math.ceil(math.ceil(n / chunks) / ROW_GROUP) * ROW_GROUP if chunks else size
    each = min(even, size)
    first = min(index * each, n)
    live = min(n - first, each)
    dead = n + index * size - first
    return slice(first, first + live), order[first : first + live].long(), order[dead : dead + size - live].long()


def _targets(target: Tensor, rows: Tensor, shift: int) -> Tensor:
    return target.flatten().long()[rows + shift]


def _inside(t: Tensor, first: int, classes: int) -> Tensor:
    return (t >= first) & (t < first + classes)


def _capped(s: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """The logit and its derivative by s."""
    if softcap is None:
        return s, torch.ones_like(s)
    return softcap * torch.tanh(s / softcap), 1 - torch.tanh(s / softcap) ** 2


def begin(
    input: Tensor, linear_weight: Tensor, target: Tensor, counts: Tensor, rows: Tensor, *, first_class: int,
    num_classes: int, chunk_rows: int, weight_dtype: torch.dtype, shift: int = 0, lean: bool = False,
    need_dw: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    n, (classes, hidden) = int(counts[0]), linear_weight.shape
    t = _targets(target, rows[:n].long(), shift)
    x = input.to(torch.bfloat16).double()[rows[:n].long()]
    logits = torch.zeros(len(rows))
    logits[:n].masked_fill_(~_inside(t, 0, num_classes), math.nan)
    own = _inside(t, first_class, classes)
    logits[:n][own] = (x[own] * linear_weight.double()[t[own] - first_class]).sum(1).float()
    class_rows = torch.full((4 * len(rows) + 2 * classes if need_dw else 0,), -1, dtype=torch.int32)
    if need_dw:
        class_rows[:n] = t - first_class
    exact = weight_dtype == torch.bfloat16 and not lean
    split = exact and classes % 64 == 0 and hidden % 128 == 0
    dw = torch.empty(
        (classes, hidden) if need_dw else (0,), dtype=torch.float32 if exact and not split else weight_dtype
    )
    return logits, class_rows, dw, torch.empty(classes * hidden if need_dw and split else 0, dtype=torch.uint8)


def _sum_so_far(dw: Tensor, low: Tensor) -> Tensor:
    """In float32, from a bfloat16 dw with its eight further bits."""
    if not low.numel():
        return dw.float()
    return ((dw.view(torch.int16).int() << 16) | (low.view(dw.shape).int() << 8)).view(torch.float32)


def _keep(total: Tensor, dw: Tensor, low: Tensor) -> None:
    """Rounded once, to 24 bits where there are as many."""
    if not low.numel():
        dw.copy_(total)
        return
    bits = total.float().contiguous().view(torch.int32) + 0x80
    dw.view(torch.int16).copy_(bits >> 16)
    low.copy_(((bits >> 8) & 0xFF).flatten())


def logits(
    input: Tensor, linear_weight: Tensor, target: Tensor, counts: Tensor, rows: Tensor, target_logits: Tensor, *,
    first_class: int, num_classes: int, first_row: int, chunk_rows: int, logit_scale: float = 1.0,
    logit_scale_tensor: Tensor | None = None, softcap: float | None = None, token_scaling: bool = False,
    shift: int = 0, need_e: bool = True,
    predicted_tokens: Tensor | None = None, largest: Tensor | None = None, **_options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scale = float(torch.tensor(logit_scale if logit_scale_tensor is None else float(logit_scale_tensor)).float())
    here, live, dead = _chunk(counts, rows, first_row, chunk_rows)
    classes, hidden = linear_weight.shape
    gathered = torch.zeros(chunk_rows, hidden, dtype=torch.bfloat16)
    gathered[: len(live)] = input[live].to(torch.bfloat16)
    x = gathered[: len(live)]
    t = _targets(target, live, shift)
    local = torch.where(_inside(t, first_class, classes), t - first_class, -1)
    own = local >= 0
    product = (x.double() @ linear_weight.double().T).float()
    capped, slope = _capped(product.double() * scale, softcap)
    z = (capped * LOG2_E).float()
    stats = torch.zeros(4, chunk_rows)
    exponent = (_capped(target_logits[here].double() * scale, softcap)[0] * LOG2_E).round().float() + TARGET_EXPONENT
    found = torch.zeros(len(live)).masked_fill(~_inside(t, 0, num_classes), math.nan)
    found[own] = product[own].gather(1, local[own, None])[:, 0]

    def of(exponent: Tensor) -> tuple[Tensor, Tensor]:
        exact = torch.exp2(z - exponent[:, None])
        exact[own] = exact[own].scatter(1, local[own, None], 0.0)
        return exact, (exact * slope.float()).to(torch.bfloat16)

    exact, rounded = of(exponent)
    bad = exact.double().sum(1) > (LARGEST_SCALED_SUM if token_scaling else LARGEST_SUM)
    if bad.any():
        exponent = torch.where(bad, z.max(1).values.round(), exponent)
        exact, rounded = of(exponent)
    e = torch.zeros(chunk_rows if need_e else 0, -(-classes // 64) * 64, dtype=torch.bfloat16)
    e[: len(live), :classes] = rounded[: len(e)]
    residue = (exact.double() * slope.float().double() - rounded.double()).sum(1)
    stats[:, : len(live)] = torch.stack((exponent, exact.double().sum(1).float(), found, residue.float()))
    if predicted_tokens is not None and largest is not None:
        predicted_tokens[dead] = -1
        largest[len(largest) - int(len(rows) - counts[0]) :] = 0
        sensed = product * (1 if scale > 0 else -1 if scale < 0 else 0)
        if classes:
            best = sensed.max(1)
            largest[here], predicted_tokens[live] = best.values, best.indices + first_class
        else:
            largest[here], predicted_tokens[live] = -math.inf, torch.iinfo(torch.int64).max
    return gathered, e, stats


def gradient(
    e: Tensor, slice_stats: Tensor, row_stats: Tensor, linear_weight: Tensor, target: Tensor, counts: Tensor,
    rows: Tensor, target_gradients: Tensor, ce: Tensor, z: Tensor, logsumexp: Tensor | None = None, *,
    first_class: int, num_classes: int, first_row: int, weight: Tensor | None = None,
    token_weight: Tensor | None = None, token_scaling: bool = False, logit_scale: float = 1.0,
    logit_scale_tensor: Tensor | None = None, softcap: float | None = None, z_loss_weight: float = 0.0,
    z_loss_weight_tensor: Tensor | None = None, shift: int = 0, need_dx: bool = True, **_options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scale = float(torch.tensor(logit_scale if logit_scale_tensor is None else float(logit_scale_tensor)).float())
    z_weight = z_loss_weight if z_loss_weight_tensor is None else float(z_loss_weight_tensor)
    size, (classes, hidden) = slice_stats.shape[1], linear_weight.shape
    here, live, dead = _chunk(counts, rows, first_row, size)
    n = len(live)
    exponent, total, own, residue = row_stats[:, :n].double()
    t = _targets(target, live, shift)
    # In float64, but for the factors that the kernels keep: log(1 + S 2^(k - z)) is the loss.
    logit, slope = _capped(own * scale, softcap)
    above = exponent - logit * LOG2_E
    ratio = total * torch.exp2(above)
    nll = torch.where(ratio.isinf(), total.log2() / LOG2_E + above / LOG2_E, torch.log1p(ratio))
    p_target = torch.exp(-nll)
    lse = logit + nll
    keep = (
        torch.ones(n)
        if weight is None
        else torch.where(_inside(t, 0, num_classes), weight[t.clamp(0, len(weight) - 1)], math.nan)
    )
    factor = torch.ones(n) if token_weight is None else token_weight.flatten()[live + shift].double()
    if token_scaling:
        factor = factor * p_target
    over = counts[4] / counts[3]
    z_slope = 2 * z_weight * float(over if over.isfinite() else 1) * lse if z_weight else torch.zeros(n)
    inverse_total = torch.exp2(above) * p_target  # 2^k / sum of all exponentials
    inverse_total = torch.where(inverse_total.isfinite() & (above < 900), inverse_total, (1 - p_target) / total)
    top = factor * scale * (keep + z_slope) * inverse_total
    v = torch.zeros(size)
    v[:n] = (top.float().double() * torch.exp2(slice_stats[0, :n].double() - exponent)).float()
    target_gradients[here] = (
        factor * scale * slope * (z_slope * p_target - keep * (1 - p_target)) + top.float().double() * residue
    ).float()
    ce[live], z[live] = (keep * nll * factor).float(), (z_weight * lse**2 * factor).float() if z_weight else 0.0
    ce[dead], z[dead] = 0, 0
    if logsumexp is not None:
        logsumexp[live], logsumexp[dead] = lse.float(), 0
    dx = torch.full((size if need_dx else 0, hidden), math.nan)
    if need_dx:
        alpha = counts[3].float().double()
        g = e[:n, :classes].double() * (v[:n].double() * alpha)[:, None]
        inside = _inside(t, first_class, classes)
        g[inside] = g[inside].scatter(
            1, (t[inside] - first_class)[:, None], (target_gradients[here][inside].double() * alpha)[:, None]
        )
        dx[:n] = (g @ linear_weight.double()).float()
    return dx, v


def weight_gradient(
    e: Tensor, gathered: Tensor, v: Tensor, counts: Tensor, rows: Tensor, class_rows: Tensor, dw: Tensor,
    dw_low: Tensor, *, first_row: int, accumulate: bool,
) -> None:  # fmt: skip
    _, live, _ = _chunk(counts, rows, first_row, len(gathered))
    n = len(live)
    gathered[:n] = (gathered[:n].float() * (v[:n] * counts[3].float())[:, None]).to(torch.bfloat16)
    part = (e[:n, : len(dw)].double().T @ gathered[:n].double()).float()
    _keep(_sum_so_far(dw, dw_low) + part if accumulate else part, dw, dw_low)


def add_targets(
    input: Tensor, counts: Tensor, rows: Tensor, class_rows: Tensor, target_gradients: Tensor, dw: Tensor,
    dw_low: Tensor, out: Tensor | None = None,
) -> None:  # fmt: skip
    n = int(counts[0])
    inside = _inside(class_rows[:n], 0, len(dw))
    x = input.to(torch.bfloat16).double()[rows[:n].long()[inside]]
    g = target_gradients[:n][inside].double() * counts[3].float().double()
    total = _sum_so_far(dw, dw_low).double().index_add_(0, class_rows[:n][inside], g[:, None] * x)
    (dw if out is None else out).copy_(total)


def store_dx(dx_sum: Tensor, counts: Tensor, rows: Tensor, dx: Tensor, *, first_row: int) -> None:
    _, live, dead = _chunk(counts, rows, first_row, len(dx_sum))
    dx[live], dx[dead] = dx_sum[: len(live)].to(dx.dtype), 0


for _name, _kernel in {
    "begin": begin,
    "logits": logits,
    "gradient": gradient,
    "weight_gradient": weight_gradient,
    "add_targets": add_targets,
    "store_dx": store_dx,
}.items():
    _library.impl(f"flce_shard_fused_{_name}", _kernel, "CPU")
