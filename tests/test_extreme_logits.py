"""Logits of the table "Inputs at the edges" of docs/semantics.md: infinite, huge, equal, and all but certain."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import syncfree_ext
from helpers import ALL_EXTRAS, compare, loss_and_gradients, small
from syncfree_ext import reference
from tolerances import ROUNDOFF, assert_close_rel, assert_equal

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["mean", "sum", "none"]
INF = math.inf


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_minus_infinity_in_the_bias(
    smoothing: float, reduction: str, rng: torch.Generator, device: torch.device
) -> None:
    """Classes that cannot happen; without smoothing the loss is finite unless the target is one of them."""
    x, w, target, b = small(rng, device, v=20)
    b[::2] = -INF
    compare(x, w, target | 1, b, reduction=reduction, label_smoothing=smoothing)
    compare(x, w, target & ~1, b, reduction=reduction, label_smoothing=smoothing)


def test_only_the_target_is_left(rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device)
    b.fill_(-INF)
    b[4] = 0.5
    out, grads = loss_and_gradients(x, w, torch.full_like(target, 4), b)
    assert out == 0
    assert not any(grad.any() for grad in grads)


def test_minus_infinity_with_softcap(rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device)
    b[3] = -INF
    compare(x, w, target, b, softcap=4.0, label_smoothing=0.1, z_loss_weight=0.1)


@pytest.mark.parametrize("size", [1e4, 1e20, 1e37])
def test_very_large_logits(size: float, rng: torch.Generator, device: torch.device) -> None:
    """One class so far above, or below, that the exponentials of the difference vanish."""
    x, w, target, b = small(rng, device)
    target[:5] = 3
    for sign in (1, -1):
        b[3] = sign * size
        compare(x, w, target, b, reduction="none")
        compare(x, w, target, b, softcap=20.0, reduction="none")


@pytest.mark.parametrize("token_scaling", [False, True])
@pytest.mark.parametrize("scale", [1e8, -1e8, 1e10, -1e20, 1e30])
def test_a_scale_that_makes_logits_huge(scale: float, token_scaling: bool, rng: torch.Generator) -> None:
    """The CPU alone: docs/semantics.md has what CUDA does with such logits."""
    x, w, target, _ = small(rng, torch.device("cpu"))
    options: dict[str, Any] = {"logit_scale": scale, "token_scaling": token_scaling, "reduction": "none"}
    compare(x, w, target, **options)
    logits = (x @ w.t()).requires_grad_()
    loss = syncfree_ext.cross_entropy(logits, target, **options)
    exact = reference.cross_entropy_gradients(logits.detach(), target, **options)
    assert_close_rel(loss, exact.output.loss, 1e-5)
    assert_close_rel(torch.autograd.grad(loss.sum(), logits)[0], exact.dx, 1e-5)


@pytest.mark.parametrize("offset", [-3000.0, 3000.0])
def test_a_common_offset_changes_nothing(offset: float, rng: torch.Generator, device: torch.device) -> None:
    """Multiples of 1/8 stay exact beside the offset."""
    x, w, target, _ = small(rng, device)
    b = torch.randint(-8, 8, (19,), generator=rng).to(device) / 8
    zero = torch.zeros_like(x)
    expected, expected_grads = loss_and_gradients(zero, w, target, b, label_smoothing=0.1)
    out, grads = loss_and_gradients(zero, w, target, b + offset, label_smoothing=0.1)
    assert_close_rel(out, expected, 1e-6)
    for a, c in zip(grads, expected_grads, strict=True):
        assert_close_rel(a, c, 1e-6, 1e-12)


def test_nan_stays_in_its_row(rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device)
    expected, expected_grads = loss_and_gradients(x, w, target, b, reduction="none")
    x[4, 2] = math.nan
    out, grads = loss_and_gradients(x, w, target, b, reduction="none")
    others = torch.arange(13, device=device) != 4
    assert out[4].isnan()
    assert_close_rel(out[others], expected[others], 1e-6)
    assert grads[0][4].isnan().all()
    assert_close_rel(grads[0][others], expected_grads[0][others], 1e-6)


def test_nan_in_an_ignored_row_is_not_read(rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device)
    target[4] = -100
    expected, expected_grads = loss_and_gradients(x, w, target, b)
    x[4] = math.nan
    out, grads = loss_and_gradients(x, w, target, b)
    assert_equal(out, expected)
    for a, c in zip(grads, expected_grads, strict=True):
        assert_equal(a, c)


# Cancellation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rest", [0.1, 1e-2, 1e-4, 1e-6, 1e-9, 1e-20])
def test_a_probability_close_to_one(rest: float, dtype: torch.dtype, device: torch.device) -> None:
    """p_t = 1 - rest: the loss and the target's gradient come from the other classes, so they keep their digits."""
    v, target = 67, torch.tensor([5, 66, 5], device=device)
    b = torch.linspace(-1, 1, v)
    margin = math.log((1 - rest) / rest) + math.log(v)
    b[5] = b[66] = margin
    x, w = torch.zeros(3, 4, dtype=dtype, device=device), torch.zeros(v, 4, dtype=dtype, device=device)
    # Only one of the two confident classes in each call.
    for t in (5, 66):
        bias = b.clone()
        bias[71 - t] = 0.0
        bias = bias.to(device)
        rows = torch.full_like(target, t)
        ref = reference.linear_cross_entropy_gradients(x, w, rows, linear_bias=bias)
        assert ref.output.loss.item() == pytest.approx(rest, rel=0.7)
        out, grads = loss_and_gradients(x, w, rows, bias)
        assert_close_rel(out, ref.output.loss, 2e-6, what="loss")
        if dtype == torch.float16 and rest < 1e-4:
            continue  # g has its power of two from the largest possible gradient: smaller ones are subnormal
        tol = ROUNDOFF[dtype] + 1e-5
        assert_close_rel(grads[2][t], ref.db[t], tol, what="db of the target")
        assert_close_rel(grads[2], ref.db, tol, what="db")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rest", [0.1, 1e-2, 1e-6])
def test_a_probability_close_to_one_in_dx_and_dw(
    rest: float, dtype: torch.dtype, rng: torch.Generator, device: torch.device
) -> None:
    """The same through both products: only the target's row of w is not small, so that its gradient decides."""
    v, h = 33, 16
    direction = torch.ones(h)
    w = torch.randn(v, h, generator=rng) / 1024
    w[7] = direction
    x = direction[None] * ((math.log((1 - rest) / rest) + math.log(v)) / h)
    x, w, target = x.to(device, dtype), w.to(device, dtype), torch.tensor([7], device=device)
    ref = reference.linear_cross_entropy_gradients(x, w, target)
    upstream = 2.0**10 if dtype == torch.float16 else 1.0
    out, grads = loss_and_gradients(x, w, target, None, upstream)
    assert_close_rel(out, ref.output.loss, 1e-5, what="loss")
    tol = 2 * ROUNDOFF[dtype] + 1e-4
    floor = 2.0**-25 * math.sqrt(v * h) if dtype == torch.float16 else 0.0
    assert_close_rel(grads[0], ref.dx * upstream, tol, floor, "dx")
    assert_close_rel(grads[1], ref.dw * upstream, tol, floor, "dw")


@pytest.mark.parametrize("size", [3.0, 30.0, 200.0])
def test_softcap_in_saturation(size: float, rng: torch.Generator, device: torch.device) -> None:
    """1 - tanh^2 keeps its digits where the logits press against the cap, down to gradients of 1e-17 and less."""
    x, w, target, _ = small(rng, device)
    b = (torch.rand(19, generator=rng) + 0.5).to(device) * size
    out, grads = loss_and_gradients(x * 0, w, target, b, softcap=10.0)
    ref = reference.linear_cross_entropy_gradients(x * 0, w, target, linear_bias=b, softcap=10.0)
    assert_close_rel(out, ref.output.loss, 1e-6)
    assert ref.db is not None
    assert_close_rel(grads[2], ref.db, 1e-5 * max(1, size / 10))


# Argmax


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("v", [2, 17, 1000, 5003])
def test_ties_go_to_the_lowest_index(v: int, dtype: torch.dtype, rng: torch.Generator, device: torch.device) -> None:
    x, w = torch.zeros(6, 3, dtype=dtype, device=device), torch.zeros(v, 3, dtype=dtype, device=device)
    for _ in range(8):
        b = torch.randint(0, 3, (v,), generator=rng).float().to(device)
        first = (b == b.max()).nonzero()[0, 0]
        target = torch.stack([first, first, *[torch.tensor(v - 1, device=device)] * 4])
        out = syncfree_ext.linear_cross_entropy(x, w, target, linear_bias=b, **ALL_EXTRAS)
        assert (out.predicted_tokens == first).all()
        assert out.token_accuracy == (target == first).float().mean()
    out = syncfree_ext.linear_cross_entropy(x, w, target, linear_bias=torch.zeros_like(b), **ALL_EXTRAS)
    assert not out.predicted_tokens.any()


def test_argmax_where_all_but_one_are_minus_infinity(device: torch.device) -> None:
    x, w = torch.zeros(2, 3, device=device), torch.zeros(9, 3, device=device)
    b = torch.full((9,), -INF, device=device)
    b[6] = -1e30
    out = syncfree_ext.linear_cross_entropy(x, w, torch.tensor([6, 6], device=device), linear_bias=b, **ALL_EXTRAS)
    assert out.predicted_tokens.tolist() == [6, 6]
    assert out.token_accuracy == 1
