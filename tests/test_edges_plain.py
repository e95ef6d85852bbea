"""Edges of the plainest call: bfloat16, no bias, no option that needs other classes than the target's.

Some devices serve it by kernels of their own, which the calls of test_edges.py (odd H, a bias) do not reach.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import loss_and_gradients, poisoned_memory
from syncfree_ext import reference
from tolerances import Bound, assert_close_rel, assert_equal

REDUCTIONS = ["mean", "sum", "none"]
BT, H, V = 300, 64, 500


def problem(rng: torch.Generator, device: torch.device, bt: int = BT, v: int = V) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(bt, H, generator=rng).to(device, torch.bfloat16)
    w = (torch.randn(v, H, generator=rng) / H**0.5).to(device, torch.bfloat16)
    return x, w, torch.randint(0, v, (bt,), generator=rng).to(device)


def compare(x: Tensor, w: Tensor, target: Tensor, upstream: Any = 1.0, **options: Any) -> tuple[Tensor, ...]:
    call = {"chunk_rows": 128, **options}
    options.pop("chunk_rows", None)
    out, grads = loss_and_gradients(x, w, target, None, upstream, **call)
    ref = reference.linear_cross_entropy_gradients(x, w, target, grad_output=upstream, **options)
    rows = out.numel() if options.get("reduction") == "none" else len(x) if options.get("reduction") == "sum" else 1
    assert_close_rel(out, ref.output.loss, 1e-4, (1e-7 + 2.0**-22 * ref.logit_max) * math.sqrt(rows), "loss")
    bound = Bound(torch.bfloat16, ref.logit_max, exact_upstream=False)
    for name, grad, expected, noise in (("dx", grads[0], ref.dx, ref.dx_noise), ("dw", grads[1], ref.dw, ref.dw_noise)):
        assert grad is not None
        assert expected is not None
        assert_close_rel(grad, expected, bound.of(grad.dtype, noise, float(expected.norm())), 1e-30, name)
    assert grads[0] is not None
    assert grads[1] is not None
    return out, grads[0], grads[1]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("bt", [0, 1, 127, 128, 129, 300])
def test_nothing_to_score(bt: int, reduction: str, rng: torch.Generator, device: torch.device) -> None:
    x, w, target = problem(rng, device, bt)
    with poisoned_memory(device):
        out, grads = loss_and_gradients(
            x, w, torch.full_like(target, -100), None, 2.0, reduction=reduction, chunk_rows=128, return_logsumexp=True
        )
    assert out.loss.grad_fn is not None
    assert torch.equal(out.loss.detach().cpu(), torch.zeros(bt if reduction == "none" else ()))
    assert torch.equal(out.logsumexp.cpu(), torch.zeros(bt))
    for grad, leaf in zip(grads[:2], (x, w), strict=True):
        assert grad is not None
        assert torch.equal(grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("scored", [1, 2, 63, 64, 65, 127, 128, 129, 257, 299])
def test_any_number_of_scored_rows(scored: int, reduction: str, rng: torch.Generator, device: torch.device) -> None:
    """Around tile and chunk boundaries; ignored rows lie anywhere, and their NaN are not read."""
    x, w, target = problem(rng, device)
    ignored = torch.randperm(BT, generator=rng)[scored:].to(device)
    target[ignored] = -100
    upstream = torch.rand(BT, generator=rng).to(device) if reduction == "none" else 0.5
    with poisoned_memory(device):
        out, dx, dw = compare(x, w, target, upstream, reduction=reduction)
    assert not dx[ignored].any()
    x[ignored] = math.nan
    again, grads = loss_and_gradients(x, w, target, None, upstream, chunk_rows=128, reduction=reduction)
    assert_equal(again.detach(), out.detach())
    assert_equal(grads[0], dx)
    assert_equal(grads[1], dw)


@pytest.mark.parametrize("scored", [2047, 2049, 2112, 2113, 4096, 4159, 4160, 4161, 6080, 6081, 6144])
def test_numbers_of_scored_rows_about_full_chunks(scored: int, rng: torch.Generator, device: torch.device) -> None:
    """Of default chunks, of 2048 rows and some that only the last one uses: a few rows more, and they take one more."""
    rows = 6144
    x, w, target = problem(rng, device, rows)
    ignored = torch.randperm(rows, generator=rng)[scored:].to(device)
    target[ignored] = -100
    x[ignored] = math.nan
    with poisoned_memory(device):
        _, grads = loss_and_gradients(x, w, target, None, chunk_rows=None)
    assert grads[0] is not None
    assert not grads[0][ignored].any()
    x[ignored] = 0
    _, dx, dw = compare(x, w, target, chunk_rows=None)
    assert_equal(grads[0], dx)
    assert_equal(grads[1], dw)


@pytest.mark.parametrize("bt", [1, 63, 64, 65, 129, 193, 257])
@pytest.mark.parametrize("v", [65, 500, 4100])
def test_batches_of_a_few_blocks_of_rows(bt: int, v: int, rng: torch.Generator, device: torch.device) -> None:
    """Products may leave out blocks of rows without a live one; what reads their output reads these too."""
    x, w, target = problem(rng, device, bt, v)
    with poisoned_memory(device):
        compare(x, w, target)
        compare(x, w, target, chunk_rows=None)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("size", [20.0, 200.0, 2000.0])
def test_targets_of_vanishing_probability(
    size: float, reduction: str, rng: torch.Generator, device: torch.device
) -> None:
    """Losses of tens to thousands of nats in some rows, while others are ordinary or all but certain."""
    x, w, target = problem(rng, device)
    rows = torch.arange(BT, device=device)
    x[rows % 3 == 0] = -size * w[target[rows % 3 == 0]]
    x[rows % 3 == 1] = size * w[target[rows % 3 == 1]]
    compare(x, w, target, reduction=reduction)


@pytest.mark.parametrize("rest", [0.1, 1e-2, 1e-6])
def test_a_probability_close_to_one(rest: float, rng: torch.Generator, device: torch.device) -> None:
    v = 96
    w = torch.randn(v, H, generator=rng) / 1024
    w[7] = 1.0
    x = torch.full((1, H), (math.log((1 - rest) / rest) + math.log(v)) / H)
    x, w, target = x.to(device, torch.bfloat16), w.to(device, torch.bfloat16), torch.tensor([7], device=device)
    ref = reference.linear_cross_entropy_gradients(x, w, target)
    out, grads = loss_and_gradients(x, w, target)
    assert_close_rel(out, ref.output.loss, 1e-4, what="loss")
    assert_close_rel(grads[0], ref.dx, 2.0**-7 + 1e-4, what="dx")
    assert_close_rel(grads[1], ref.dw, 2.0**-7 + 1e-4, what="dw")


def test_all_rows_have_one_target(rng: torch.Generator, device: torch.device) -> None:
    x, w, target = problem(rng, device, 1000)
    for t in (0, V - 1):
        compare(x, w, torch.full_like(target, t))


@pytest.mark.parametrize("v", [1, 2, 3, 63, 64, 65, 191, 192, 193, 255, 257])
def test_any_number_of_classes(v: int, rng: torch.Generator, device: torch.device) -> None:
    x, w, target = problem(rng, device, 200, v)
    if v == 1:
        out, grads = loss_and_gradients(x, w, target)
        assert abs(out.item()) <= 1e-6
        assert all(float(grad.abs().max()) <= 1e-6 for grad in grads[:2])
        return
    target[0], target[1] = 0, v - 1
    compare(x, w, target, reduction="none")
    compare(x - 3 * w.float().mean(0).bfloat16(), w, target, z_loss_weight=0.01, token_scaling=True)


@pytest.mark.parametrize("nats", [60, 70, 90, 104, 108, 110.3, 130, 300])
@pytest.mark.parametrize(
    "options", [{}, {"num_items": 2e6}, {"token_weight": 1e-9}], ids=["plain", "divided", "weighted"]
)
def test_one_class_far_above_the_target(
    nats: float, options: dict[str, float], rng: torch.Generator, device: torch.device
) -> None:
    """A loss of many nats through large weights: neither 1 / sum nor a product with W may leave float32."""
    x, w, _ = problem(rng, device, 256, 64)
    target = torch.randint(1, 64, (256,), generator=rng).to(device)
    x[::5], x[::5, 0] = 0, 0.125
    w[:, 0] = 0
    w[0, 0] = nats / 0.125
    more: dict[str, Any] = {}
    if "num_items" in options:
        more["num_items"] = torch.tensor(options["num_items"], device=device)
    if "token_weight" in options:
        more["token_weight"] = torch.full((256,), options["token_weight"], device=device)
    compare(x, w, target, **more)


@pytest.mark.parametrize("nats", [20, 40, 44, 50, 57, 64])
def test_token_scaling_by_vanishing_probabilities(nats: float, rng: torch.Generator, device: torch.device) -> None:
    """The target's probability is a factor of each gradient: e^-nats, and of most classes once more."""
    x, w, _ = problem(rng, device, 256, 64)
    target = torch.randint(1, 64, (256,), generator=rng).to(device)
    x[:, 0] = 0.125
    w[:, 0] = 0
    w[0, 0] = nats / 0.125
    compare(x, w, target, token_scaling=True, reduction="sum")


@pytest.mark.parametrize("bad", [V, -1, 2**31, 2**63 - 1, -(2**63)])
def test_target_out_of_range(bad: int, rng: torch.Generator, device: torch.device) -> None:
    x, w, target = problem(rng, device)
    target[200] = bad
    if device.type == "cpu":
        with pytest.raises(IndexError, match="target"):
            loss_and_gradients(x, w, target)
        return
    others = torch.arange(BT, device=device) != 200
    expected, expected_grads = loss_and_gradients(
        x, w, torch.where(others, target, -100), reduction="none", chunk_rows=128
    )
    out, grads = loss_and_gradients(x, w, target, reduction="none", chunk_rows=128)
    torch.cuda.synchronize()
    assert out[200].isnan()
    assert grads[0][200].isnan().all()
    assert grads[1].isnan().all()
    assert_close_rel(out[others], expected[others], 1e-6)
    assert_close_rel(grads[0][others], expected_grads[0][others], 1e-6)
    out, grads = loss_and_gradients(x, w, target, chunk_rows=128)
    assert out.isnan()
    assert grads[0][200].isnan().all()
    assert grads[1].isnan().all()


def test_nan_and_infinity_stay_in_their_row(rng: torch.Generator, device: torch.device) -> None:
    x, w, target = problem(rng, device)
    expected, expected_grads = loss_and_gradients(x, w, target, reduction="none", chunk_rows=128)
    for value in (math.nan, math.inf, -math.inf):
        x[150, 3] = value
        out, grads = loss_and_gradients(x, w, target, reduction="none", chunk_rows=128)
        others = torch.arange(BT, device=device) != 150
        assert not out[150].isfinite()
        assert_close_rel(out[others], expected[others], 1e-6)
        assert_close_rel(grads[0][others], expected_grads[0][others], 1e-6)


@pytest.mark.parametrize("row", [0, 299])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_of_any_chunk_reaches_dw(value: float, row: int, rng: torch.Generator, device: torch.device) -> None:
    # A shape whose dW may be kept in fewer bits between chunks: what is not finite must survive that.
    x = torch.randn(BT, 128, generator=rng).to(device, torch.bfloat16)
    w = (torch.randn(512, 128, generator=rng) / 16).to(device, torch.bfloat16)
    target = torch.randint(0, 512, (BT,), generator=rng).to(device)
    x[row, 3] = value
    for options in ({}, {"accum_dtype": torch.bfloat16}):
        out, grads = loss_and_gradients(x, w, target, chunk_rows=128, **options)
        assert not out.isfinite()
        assert grads[0] is not None
        assert grads[1] is not None
        assert not grads[0][row].isfinite().any()
        assert not grads[1].isfinite().any()
        assert grads[0][1:299].isfinite().all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_upstream_zero_and_infinite(reduction: str, rng: torch.Generator, device: torch.device) -> None:
    x, w, target = problem(rng, device)
    _, grads = loss_and_gradients(x, w, target, None, 0.0, reduction=reduction)
    assert not any(grad.any() for grad in grads[:2])
    for upstream in (math.inf, math.nan):
        _, grads = loss_and_gradients(x, w, target, None, upstream, reduction=reduction)
        assert not any(grad.isfinite().any() for grad in grads[:2])


@pytest.mark.parametrize("shift", [1, 3, 60])
def test_shift(shift: int, rng: torch.Generator, device: torch.device) -> None:
    x, w, target = problem(rng, device)
    target[::7] = -100
    x, target = x.view(5, 60, H), target.view(5, 60)
    out, grads = loss_and_gradients(x, w, target, shift=shift, chunk_rows=128)
    moved = torch.full_like(target, -100)
    moved[:, : 60 - shift] = target[:, shift:]
    expected, expected_grads = loss_and_gradients(x, w, moved, chunk_rows=128)
    assert_equal(out.detach(), expected.detach())
    for a, b in zip(grads[:2], expected_grads[:2], strict=True):
        assert_equal(a, b)


def test_nothing_beside_strided_arguments_is_read(rng: torch.Generator, device: torch.device) -> None:
    """Rows further apart than they are long, with NaN in between."""
    x, w, target = problem(rng, device)
    expected = loss_and_gradients(x, w, target, chunk_rows=128)
    wide_x, wide_w = (torch.full((len(t), H + 8), math.nan, device=device, dtype=t.dtype) for t in (x, w))
    wide_x[:, :H], wide_w[:, :H] = x, w
    got = loss_and_gradients(wide_x[:, :H], wide_w[:, :H], target, chunk_rows=128)
    for a, b in zip((got[0], *got[1][:2]), (expected[0], *expected[1][:2]), strict=True):
        assert_equal(a.detach(), b.detach())
