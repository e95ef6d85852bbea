"""A call held to float64 whatever its options: tolerances that know where a difference of large numbers is small.

The bounds of tolerances.py are relative to a result. Options of any sign make results out of parts that cancel: class
weights of both signs, a smoothed target beside a flat softmax, logits x . w that are far below |x| . |w|. No arithmetic
of finite precision is accurate relative to such a result; it is relative to the sum of the absolute values of the
parts. So each comparison has a floor of that sum times a few units of the last place of the accumulation type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cases import Call
from syncfree_ext import reference
from tolerances import ROUNDING, ROUNDOFF, Bound, assert_close_rel, assert_equal, smallest_error

EXTRAS = ("z_loss", "token_accuracy", "predicted_tokens", "logsumexp")


@dataclass(frozen=True)
class Exact:
    """What a call should give, in float64 and on the device of its tensors, and how well arithmetic can know it.

    `logits` [N, V], final, of the N scored rows, whose indices are `rows` and targets `target`. `spread`: a logit is
    known to a few 2^-24 of it. `loss_size`: the absolute values of what the loss adds up. The floors: absolute errors,
    in the L2 norm, that no accumulation in `wide` is to be blamed for. `dx_size`, `dw_size`, `db_size`: the norms of
    the gradients if no part of them cancelled.
    """

    gradients: reference.Gradients
    logits: Tensor
    rows: Tensor
    target: Tensor
    spread: float
    wide: torch.dtype
    loss_size: float
    loss_floor: float
    z_floor: float
    dx_floor: float
    dw_floor: float
    db_floor: float
    dx_size: float
    dw_size: float
    db_size: float


def _aligned(values: Tensor, shift: int, filler: float) -> Tensor:
    out = torch.full(values.shape, filler, dtype=values.dtype, device=values.device)
    if values.dim() and shift < values.shape[-1]:
        out[..., : values.shape[-1] - shift] = values[..., shift:]
    return (out if values.dim() else values).reshape(-1)


@dataclass(frozen=True)
class _Scored:
    """The scored rows of a call, in float64: what its loss and the gradient of its logits are made of."""

    logits: Tensor
    p: Tensor
    lse: Tensor
    target: Tensor
    weight: Tensor  # c, ones without class weights
    factor: Tensor  # |token weight|, times p_t with token scaling
    upstream: Tensor  # absolute
    inv_ce: float
    inv_z: float
    smoothing: float
    z_weight: float
    scale: float
    token_scaling: bool
    spread: float

    def gradient_parts(self) -> Tensor:
        """The sum of the absolute parts of each entry of the gradient of the logits."""
        own = torch.zeros_like(self.p).scatter_(1, self.target[:, None], 1.0)
        hit = torch.where(own > 0, (self.p * (1 - own)).sum(1, keepdim=True), self.p)
        c, share = self.weight.abs(), self.smoothing / len(self.weight)
        g = self.inv_ce * ((1 - self.smoothing) * c[self.target][:, None] * hit + share * (c.sum() * self.p + c))
        g = g + self.inv_z * 2 * self.z_weight * self.lse.abs()[:, None] * self.p
        return g * (self.factor * self.upstream)[:, None] * abs(self.scale)

    def half_spacing(self, parts: Tensor) -> float:
        """float16 carries |g| up to 2^10 with a spacing of 2^-24: 2^-34 of the largest factor that a row can have."""
        if not parts.numel():
            return 0.0
        largest = float((self.upstream if self.token_scaling else self.factor * self.upstream).max())
        largest *= max(1.0, float(self.weight.abs().max())) * abs(self.scale) * (2 + 256 * self.z_weight)
        return 2.0**-33 * max(float(parts.amax()), largest * max(self.inv_ce, self.inv_z))

    def loss_parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row: the absolute parts of its loss, and what the error of a logit does to it and to its z part."""
        c, share = self.weight.abs(), self.smoothing / len(self.weight)
        own, lse = c[self.target], self.lse.abs()
        # An error of a logit changes p_t by as much relative to p_t.
        scaled = 1.0 + (self.spread if self.token_scaling else 0.0)
        nll = self.lse - self.logits.gather(1, self.target[:, None])[:, 0]
        size = self.inv_ce * own * nll * scaled + self.inv_z * self.z_weight * lse.square()
        if self.smoothing > 0:
            size = size + self.inv_ce * c.max() * (self.spread + lse)
        known = max(1.0, self.spread)
        z_slope = self.inv_z * self.z_weight * 2 * lse
        blur = (self.inv_ce * (own + share * c.sum()) + z_slope) * known
        z_blur = (z_slope * known + self.inv_z * self.z_weight * lse.square()) * scaled
        return self.factor * size, self.factor * blur, self.factor * z_blur


def _scored(call: Call, x: Tensor, w: Tensor, rows: Tensor, target: Tensor, ignore: int, logits: bool) -> _Scored:
    o = call.options
    bias = x.new_zeros(()) if call.linear_bias is None else call.linear_bias.double()
    scale = float(o["logit_scale"])
    s = scale * (x if logits else x @ w.T + bias)
    parts = abs(scale) * (x.abs() if logits else x.abs() @ w.abs().T + bias.abs())
    cap = o["softcap"]
    final = s if cap is None else cap * torch.tanh(s / cap)
    spread = float(torch.where(parts.isfinite(), parts, 0).max()) if parts.numel() else 0.0
    weight = s.new_ones(s.shape[1]) if o["weight"] is None else o["weight"].double()
    counts, _ = reference.count_targets(
        call.target.reshape(call.target.shape or (1,)), s.shape[1], weight=o["weight"], num_items=o.get("num_items"),
        reduction=o["reduction"], ignore_index=ignore, shift=o["shift"],
    )  # fmt: skip
    p = torch.softmax(final, 1)
    factor = s.new_ones(len(rows))
    if o["token_weight"] is not None:
        factor = _aligned(o["token_weight"].double(), o["shift"], 0.0)[rows].abs()
    if o["token_scaling"]:
        factor = factor * p.gather(1, target[:, None])[:, 0]
    upstream = call.upstream.double().abs()
    return _Scored(
        logits=final,
        p=p,
        lse=torch.logsumexp(final, 1),
        target=target,
        weight=weight,
        factor=factor,
        upstream=upstream.reshape(-1)[rows] if o["reduction"] == "none" else upstream.expand(len(rows)),
        inv_ce=float(counts[3].abs()),
        inv_z=float(counts[4].abs()),
        smoothing=o["label_smoothing"],
        z_weight=float(o["z_loss_weight"]),
        scale=scale,
        token_scaling=o["token_scaling"],
        # The slope of a softcap knows its logit relative to the cap.
        spread=spread if cap is None else spread * (1 + 2 / cap),
    )


def exact(call: Call, compute: torch.dtype | None = None, logits: bool = False) -> Exact:
    """The exact result of a call, whose products or logits are read in the dtype `compute`."""
    compute = compute or call.input.dtype
    o = call.options
    x, w = call.input.detach().to(compute).double(), call.linear_weight.detach().to(compute).double()
    if logits:
        ref = reference.cross_entropy_gradients(x, call.target, grad_output=call.upstream, **o)
    else:
        ref = reference.linear_cross_entropy_gradients(
            x, w, call.target, linear_bias=call.linear_bias, grad_output=call.upstream, **o
        )
    ignore = -100 if o.get("ignore_index") is None else o["ignore_index"]
    aligned = _aligned(call.target.long(), o["shift"], ignore)
    rows = (aligned != ignore).nonzero()[:, 0]
    x = x.reshape(-1, x.shape[-1])[rows]
    scored = _scored(call, x, w, rows, aligned[rows], ignore, logits)
    wide = torch.float64 if compute == torch.float64 else torch.float32
    unit = 2.0**-50 if wide == torch.float64 else 2.0**-21
    g = scored.gradient_parts()
    blurred = unit * max(1.0, scored.spread) * g + (scored.half_spacing(g) if compute == torch.float16 else 0.0)
    size, blur, z_blur = scored.loss_parts()

    def carried(by: Tensor) -> tuple[float, float, float]:
        dx = by if logits else by @ w.abs()
        dw = by.new_zeros(()) if logits else by.T @ x.abs()
        return float(dx.norm()), float(dw.norm()), float(by.sum(0).norm())

    def joined(values: Tensor) -> float:
        return float(values.norm() if o["reduction"] == "none" else values.sum())

    floors, sizes = carried(blurred), carried(g)
    return Exact(
        gradients=ref,
        logits=scored.logits,
        rows=rows,
        target=scored.target,
        spread=max(scored.spread, ref.logit_max),
        wide=wide,
        loss_size=joined(size),
        loss_floor=unit * joined(blur) + 1e-30,
        z_floor=unit * joined(z_blur) + 1e-30,
        dx_floor=floors[0],
        dw_floor=floors[1],
        db_floor=floors[2],
        dx_size=sizes[0],
        dw_size=sizes[1],
        db_size=sizes[2],
    )


def check_values(call: Call, e: Exact, out: Any, compute: torch.dtype | None = None) -> None:
    """Loss and extras, whichever are there, of a call on any device."""
    compute = compute or call.input.dtype
    expected = e.gradients.output
    loss = out if isinstance(out, Tensor) else out.loss
    assert loss.dtype == e.wide
    # The losses of half-precision products may come from rounded terms: 1e-4, of the sum of their absolute values.
    relative = 1e-4 if compute in (torch.bfloat16, torch.float16) else 1e-6 if e.wide == torch.float32 else 1e-12
    assert_close_rel(loss, expected.loss, relative, e.loss_floor + relative * e.loss_size, "loss")
    if isinstance(out, Tensor):
        return
    for name in EXTRAS:
        if getattr(out, name) is not None:
            assert not getattr(out, name).requires_grad
    if out.z_loss is not None:
        assert out.z_loss.dtype == e.wide
        assert_close_rel(out.z_loss, expected.z_loss, relative, e.z_floor, "z_loss")
    if out.logsumexp is not None:
        unit = 2.0**-50 if e.wide == torch.float64 else 2.0**-21
        if compute == torch.float16 and loss.is_cuda:
            # A product of float16 has 22 bits, more than fit below the largest of a step that tensor cores add at once.
            # Where all have one sign the cuts add up. Seen: 2.8e-6 of 512 products, 2^-27.5 of the sum each.
            unit = max(unit, call.input.shape[-1] * 2.0**-26)
        floor = unit * max(1.0, e.spread) * math.sqrt(max(1, len(e.rows)))
        assert_close_rel(out.logsumexp, expected.logsumexp, unit, floor, "logsumexp")
    _check_argmax(call, e, out)


def _check_argmax(call: Call, e: Exact, out: Any) -> None:
    best = e.logits.argmax(1) if e.logits.numel() else e.target
    error = (2.0**-49 if e.wide == torch.float64 else 2.0**-20) * max(1.0, e.spread)
    at_best = e.logits.gather(1, best[:, None])[:, 0]
    if out.predicted_tokens is not None:
        predicted = out.predicted_tokens.to(e.rows.device).reshape(-1)
        assert predicted.dtype == torch.int64
        ignored = torch.ones_like(predicted, dtype=torch.bool)
        ignored[e.rows] = False
        assert_equal(predicted == -1, ignored, "predicted_tokens of ignored rows")
        # Another class is right where its logit is equal to within its error.
        ours = e.logits.gather(1, predicted[e.rows][:, None])[:, 0]
        assert not bool((at_best - ours > error).any()), "predicted a class that is not the best"
    if out.token_accuracy is not None:
        assert out.token_accuracy.dtype == torch.float32
        at_target = e.logits.gather(1, e.target[:, None])[:, 0]
        others = e.logits.scatter(1, e.target[:, None], -math.inf).amax(1)
        sure = (at_target > others + error).double()
        possible = (at_target >= others - error).double()
        got = out.token_accuracy.double().to(e.rows.device).reshape(-1)
        if call.options["reduction"] == "none":
            assert bool((got[e.rows] >= sure).all())
            assert bool((got[e.rows] <= possible).all())
            assert float(got.sum()) == float(got[e.rows].sum())
        else:
            n = max(1, len(e.rows))
            assert float(sure.sum()) / n - 1e-6 <= float(got) <= float(possible.sum()) / n + 1e-6


def check_gradients(
    call: Call,
    e: Exact,
    grads: tuple[Tensor | None, ...],
    trainable: str,
    compute: torch.dtype | None = None,
    repeated: bool = False,
) -> None:
    """The gradients of the leaves named in trainable; those of the others are None.

    `repeated`: rows of the input, or of the weight, are equal. Their gradients are then rounded alike, and the errors
    add up as the entries do: two roundings of everything that does not cancel, in place of independent errors.
    """
    compute = compute or call.input.dtype
    upstream = abs(float(call.upstream.reshape(-1)[0])) if call.upstream.numel() else 1.0
    exact_upstream = call.options["reduction"] == "none" or math.frexp(upstream)[0] in (0.0, 0.5)
    bound = Bound(compute, e.spread, exact_upstream)
    ref = e.gradients
    alike = 2 * ROUNDOFF[compute] if repeated and compute in ROUNDING else 0.0
    for name, leaf, grad, expected, noise, floor in (
        ("x", call.input, grads[0], ref.dx, ref.dx_noise, e.dx_floor + alike * e.dx_size),
        ("w", call.linear_weight, grads[1], ref.dw, ref.dw_noise, e.dw_floor + alike * e.dw_size),
        ("b", call.linear_bias, grads[2], ref.db, ref.db_noise, e.db_floor + alike * e.db_size),
    ):
        if leaf is None or name not in trainable:
            assert grad is None, f"d{name} of a frozen leaf"
            continue
        assert grad is not None, f"no d{name}"
        assert grad.dtype == leaf.dtype
        assert expected is not None
        expected = expected.view(leaf.shape)
        norm = float(expected.norm())
        tol = bound.of(grad.dtype, noise, norm) if math.isfinite(noise) else 0.0
        if name == "x" and compute != leaf.dtype:
            tol += ROUNDOFF[compute]  # on its way through the cast that autocast made
        stored = compute if name in "xw" else grad.dtype
        floor += 1e-30 + smallest_error(stored, grad.numel()) + smallest_error(grad.dtype, grad.numel())
        assert_close_rel(grad, expected, tol, floor, f"d{name}")
