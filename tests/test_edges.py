"""The table "Inputs at the edges" of docs/semantics.md, a test for each of its claims. Errors are in test_errors.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import syncfree_ext
from helpers import ALL_EXTRAS, check, compare, loss_and_gradients, poisoned_memory, small
from syncfree_ext import reference
from tolerances import Bound, assert_close_rel, assert_equal, smallest_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["mean", "sum", "none"]
INF = math.inf


# Every token ignored, and no tokens


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight": True, "label_smoothing": 0.1, "z_loss_weight": 0.1},
        {"token_scaling": True, "token_weight": True, "softcap": 5.0},
    ],
    ids=["plain", "weight, smoothing, z", "token scaling, token weight, softcap"],
)
def test_every_token_ignored(
    options: dict[str, Any], reduction: str, dtype: torch.dtype, rng: torch.Generator, device: torch.device
) -> None:
    x, w, target, b = small(rng, device, dtype=dtype)
    target.fill_(-100)
    options = dict(options)
    if "weight" in options:
        options["weight"] = torch.rand(19, generator=rng).to(device)
    if "token_weight" in options:
        options["token_weight"] = torch.rand(13, generator=rng).to(device)
    with poisoned_memory(device):
        out, grads = loss_and_gradients(x, w, target, b, 3.0, reduction=reduction, **options, **ALL_EXTRAS)
    assert out.loss.grad_fn is not None
    shape = (13,) if reduction == "none" else ()
    for name in ("loss", "z_loss", "token_accuracy"):
        assert_equal(getattr(out, name).detach(), torch.zeros(shape), name)
    assert_equal(out.predicted_tokens, torch.full((13,), -1))
    assert_equal(out.logsumexp, torch.zeros(13))
    for grad in grads:
        assert grad is not None
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("num_items", [0, 5.0])
def test_every_token_ignored_with_num_items(num_items: float, rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device)
    for value in (num_items, torch.tensor(num_items, device=device)):
        out, grads = loss_and_gradients(x, w, torch.full_like(target, -100), b, num_items=value)
        assert out == 0
        assert not any(grad.any() for grad in grads)


def test_a_shift_past_the_end_ignores_every_token(rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device, bt=12)
    for shift in (4, 5, 100):
        out, grads = loss_and_gradients(x.view(3, 4, -1), w, target.view(3, 4), b, shift=shift)
        assert out == 0
        assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)], ids=str)
def test_no_tokens(
    shape: tuple[int, ...], reduction: str, dtype: torch.dtype, rng: torch.Generator, device: torch.device
) -> None:
    _, w, _, b = small(rng, device, dtype=dtype)
    x, target = torch.empty(*shape, 7, device=device, dtype=dtype), torch.empty(shape, device=device, dtype=torch.int64)
    with poisoned_memory(device):
        out, grads = loss_and_gradients(x, w, target, b, reduction=reduction, **ALL_EXTRAS)
    assert out.loss.grad_fn is not None
    assert_equal(out.loss.detach(), torch.zeros(shape if reduction == "none" else ()))
    assert out.predicted_tokens.shape == out.logsumexp.shape == shape
    if reduction != "none":
        assert out.token_accuracy == 0
    for grad, leaf in zip(grads, (x, w, b), strict=True):
        assert grad is not None
        assert_equal(grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_outputs_are_written_in_full(reduction: str, rng: torch.Generator, device: torch.device) -> None:
    """In memory full of NaN everything comes out as it does otherwise, also from chunks without a valid row."""
    x, w, target, b = small(rng, device, bt=700, h=33, v=131, dtype=torch.bfloat16)
    target[torch.rand(700, generator=rng).to(device) < 0.7] = -100
    upstream = torch.rand(700, generator=rng).to(device) if reduction == "none" else 0.5
    options = {"reduction": reduction, "z_loss_weight": 0.1, "label_smoothing": 0.1, "chunk_rows": 128, **ALL_EXTRAS}
    expected, expected_grads = loss_and_gradients(x, w, target, b, upstream, **options)
    with poisoned_memory(device):
        out, grads = loss_and_gradients(x, w, target, b, upstream, **options)
    for a, c in zip((*out, *grads), (*expected, *expected_grads), strict=True):
        assert a.isfinite().all()
        assert_equal(a, c)


# Counts and divisors


def test_num_items(rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device)
    total, total_grads = loss_and_gradients(x, w, target, b, reduction="sum")
    for items, divisor in ((0, 1), (-3, 1), (-0.5, 1), (0.25, 0.25), (7, 7), (2**40, 2**40)):
        for value in (
            items,
            torch.tensor(items, device=device),
            torch.tensor([items], device=device),
            torch.tensor([[items]], dtype=torch.float64, device=device),
        ):
            out, grads = loss_and_gradients(x, w, target, b, num_items=value)
            assert_close_rel(out, total / divisor, 1e-6)
            for grad, whole in zip(grads, total_grads, strict=True):
                assert_close_rel(grad, whole / divisor, 1e-5)


def test_numbers_of_numpy_are_numbers(rng: torch.Generator, device: torch.device) -> None:
    """A count that was taken with NumPy is an np.int64, which is no int."""
    np = pytest.importorskip("numpy")
    x, w, target, b = small(rng, device)
    target[::3] = 7
    numbers = {"num_items": 9, "ignore_index": 7, "label_smoothing": 0.5, "softcap": 2.0, "logit_scale": 0.25}
    numbers |= {"z_loss_weight": 0.5, "shift": 1, "chunk_rows": 4, "workspace_bytes": 4096}
    expected, expected_grads = loss_and_gradients(x, w, target, b, **numbers)
    for integer, real in ((np.int64, np.float32), (np.int32, np.float64)):
        given = {name: (integer if isinstance(value, int) else real)(value) for name, value in numbers.items()}
        out, grads = loss_and_gradients(x, w, target, b, **given)
        for a, e in zip((out, *grads), (expected, *expected_grads), strict=True):
            assert_equal(a, e)
        num_items = {"num_items": given["num_items"], "ignore_index": given["ignore_index"]}
        syncfree_ext.cross_entropy(x, target % x.shape[-1], **num_items)


def test_class_weights_of_zero_for_all_targets_give_nan(rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device)
    weight = torch.zeros(19, device=device)
    out, grads = loss_and_gradients(x, w, target, b, weight=weight)
    assert out.isnan()
    assert all(grad.isnan().all() for grad in grads)
    for options in ({"reduction": "sum"}, {"num_items": 3}):
        out, grads = loss_and_gradients(x, w, target, b, weight=weight, **options)
        assert out == 0
        assert not any(grad.any() for grad in grads)


def test_negative_weights(rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device)
    weight, token_weight = (torch.randn(n, generator=rng).to(device) for n in (19, 13))
    # Per row: in a sum, losses of both signs may cancel.
    compare(x, w, target, b, weight=weight, token_weight=token_weight, reduction="none", label_smoothing=0.1)
    compare(x, w, target, b, weight=weight.abs().neg(), label_smoothing=0.1)


def test_token_weight_of_ignored_rows_is_not_read(rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device)
    target[::3] = -100
    token_weight = torch.rand(13, generator=rng).to(device)
    expected = loss_and_gradients(x, w, target, b, token_weight=token_weight)
    token_weight[::3] = math.nan
    out = loss_and_gradients(x, w, target, b, token_weight=token_weight)
    for a, c in zip((out[0], *out[1]), (expected[0], *expected[1]), strict=True):
        assert_equal(a, c)


# Targets


@pytest.mark.parametrize("ignore_index", [0, 4, 18])
def test_ignore_index_that_is_a_class(ignore_index: int, rng: torch.Generator, device: torch.device) -> None:
    """Rows with it are skipped; the class stays in the softmax of the others."""
    x, w, target, b = small(rng, device)
    target[::4] = ignore_index
    _, (dx, dw, _) = compare(x, w, target, b, ignore_index=ignore_index, label_smoothing=0.1)
    assert not dx[target == ignore_index].any()
    assert dw[ignore_index].any()


def test_ignore_index_none_is_minus_100(rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device)
    target[2] = -100
    a = loss_and_gradients(x, w, target, b, ignore_index=None)
    c = loss_and_gradients(x, w, target, b)
    assert_equal(a[0], c[0])


OUT_OF_RANGE = [19, 20, -1, -99, -101, 10**9, 2**31, 2**32 + 3, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("bad", OUT_OF_RANGE)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_target_out_of_range(bad: int, reduction: str, rng: torch.Generator, device: torch.device) -> None:
    """CPU: IndexError. CUDA: that row is NaN, and so is what it takes part in; the other rows are as they were."""
    x, w, target, b = small(rng, device)
    target[5] = bad
    if device.type == "cpu":
        with pytest.raises(IndexError, match=rf"target.*19.*{bad}"):
            loss_and_gradients(x, w, target, b, reduction=reduction)
        return
    out, grads = loss_and_gradients(x, w, target, b, reduction=reduction, **ALL_EXTRAS)
    torch.cuda.synchronize()
    others = torch.arange(13, device=device) != 5
    assert out.loss[5].isnan() if reduction == "none" else out.loss.isnan()
    assert grads[0][5].isnan().all()
    assert grads[1].isnan().all()
    assert grads[2].isnan().all()
    good = torch.where(others, target, -100)
    expected, expected_grads = loss_and_gradients(
        x, w, good, b, reduction=reduction, **ALL_EXTRAS, **({"num_items": 13} if reduction == "mean" else {})
    )
    assert_close_rel(grads[0][others], expected_grads[0][others], 1e-6)
    assert_close_rel(out.logsumexp[others], expected.logsumexp[others], 1e-6)
    if reduction == "none":
        assert_close_rel(out.loss[others], expected.loss[others], 1e-6)


def test_target_out_of_range_with_class_weights(rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device)
    target[5] = 10**9
    weight = torch.rand(19, generator=rng).to(device)
    if device.type == "cpu":
        with pytest.raises(IndexError, match="target"):
            loss_and_gradients(x, w, target, b, weight=weight)
        return
    out, grads = loss_and_gradients(x, w, target, b, weight=weight, label_smoothing=0.1)
    assert out.isnan()
    assert all(grad.isnan().any() for grad in grads)


def test_targets_that_shift_leaves_out_are_not_read(rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device, bt=12)
    target = target.view(3, 4)
    expected, _ = loss_and_gradients(x.view(3, 4, -1), w, target, b, shift=2)
    target[:, :2] = 10**9
    out, _ = loss_and_gradients(x.view(3, 4, -1), w, target, b, shift=2)
    assert_equal(out, expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 3, 2)], ids=str)
def test_ranks(shape: tuple[int, ...], rng: torch.Generator, device: torch.device) -> None:
    bt = math.prod(shape)
    x, w, target, b = small(rng, device, bt=bt)
    expected, expected_grads = loss_and_gradients(x, w, target, b, reduction="none", **ALL_EXTRAS)
    x, target = x.view(*shape, 7), target.view(shape)
    out, grads = loss_and_gradients(x, w, target, b, reduction="none", **ALL_EXTRAS)
    for a, c in zip(out, expected, strict=True):
        assert_equal(a.detach(), c.detach().view(shape))
    for a, c in zip(grads, expected_grads, strict=True):
        assert_equal(a, c.view(a.shape))


# Degenerate sizes and scales


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3}, {"weight": True}, {"softcap": 2.0}], ids=str)
def test_one_class(options: dict[str, Any], rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device, v=1)
    options = {**options, "weight": torch.ones(1, device=device)} if "weight" in options else options
    out, grads = loss_and_gradients(x, w, target, b, **options, **ALL_EXTRAS)
    assert abs(out.loss.item()) <= 1e-6
    assert out.token_accuracy == 1
    assert all(float(grad.abs().max()) <= 1e-6 for grad in grads)


@pytest.mark.parametrize("scale", [0.0, -1.5, 1e-3, 40.0])
def test_logit_scales(scale: float, rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device)
    a, a_grads = loss_and_gradients(x, w, target, b, logit_scale=scale)
    ref = reference.linear_cross_entropy_gradients(x, w, target, linear_bias=b, logit_scale=scale)
    check(a, a_grads, ref, 1e-5 * max(1.0, ref.logit_max / 32))
    c, c_grads = loss_and_gradients(x, w, target, b, logit_scale=torch.tensor(scale, device=device))
    for p, q in zip((a, *a_grads), (c, *c_grads), strict=True):
        assert_close_rel(p, q, 1e-6, 1e-9)


@pytest.mark.parametrize("scale", [0.0, -1.5, 40.0])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("hidden", [7, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logit_scales_in_16_bits(
    dtype: torch.dtype, hidden: int, with_bias: bool, scale: float, rng: torch.Generator, device: torch.device
) -> None:
    """Where a row ends within a load, what fills it up must stay out of the results under every scale."""
    x, w, target, b = small(rng, device, h=hidden)
    x, w, b = x.to(dtype), w.to(dtype), b.to(dtype) if with_bias else None
    loss, grads = loss_and_gradients(x, w, target, b, logit_scale=scale)
    ref = reference.linear_cross_entropy_gradients(x, w, target, linear_bias=b, logit_scale=scale)
    assert_close_rel(loss, ref.output.loss, 1e-3, 1e-6, "loss")
    bound = Bound(dtype, ref.logit_max)
    pairs = [("dx", grads[0], ref.dx, ref.dx_noise), ("dw", grads[1], ref.dw, ref.dw_noise)]
    for name, grad, expected, noise in pairs:
        tol = bound.of(dtype, noise, float(expected.norm()))
        assert_close_rel(grad, expected, tol, smallest_error(dtype, expected.numel()), name)


# Strides and upstream gradients


def test_expanded_arguments(rng: torch.Generator, device: torch.device) -> None:
    """Stride 0 in each argument."""
    x, w, target, _ = small(rng, device)
    b = torch.randn(1, generator=rng).to(device).expand(19)
    compare(x[:1].expand(13, 7), w, target, b)
    # Equal rows of w make dX exactly zero but for rounding; what must agree is the same call with copies.
    out, grads = loss_and_gradients(x, w[:1].expand(19, 7), target, b)
    expected, expected_grads = loss_and_gradients(x, w[:1].repeat(19, 1), target, b)
    for a, c in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert_close_rel(a, c, 1e-6, 1e-6)
    compare(x[:, :1].expand(13, 7), w[:, :1].expand(19, 7), target[:1].expand(13), b)
    half = torch.full((), 0.5, device=device)
    compare(x, w, target, b, weight=half.expand(19), token_weight=half.expand(13), label_smoothing=0.1)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_upstream_zero(reduction: str, rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device)
    _, grads = loss_and_gradients(x, w, target, b, 0.0, reduction=reduction)
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_upstream_infinite_or_nan(dtype: torch.dtype, rng: torch.Generator, device: torch.device) -> None:
    """A loss scaler must see an overflow."""
    x, w, target, b = small(rng, device, dtype=dtype)
    _, plain = loss_and_gradients(x, w, target, b)
    for upstream in (INF, -INF):
        _, grads = loss_and_gradients(x, w, target, b, upstream)
        for grad, g in zip(grads, plain, strict=True):
            sure = g.abs().float() > 1e-6
            assert_equal(grad[sure], (g[sure].float() * upstream).to(dtype))
    _, grads = loss_and_gradients(x, w, target, b, math.nan)
    assert all(grad.isnan().all() for grad in grads)


def test_one_infinite_upstream_row(rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device)
    upstream = torch.ones(13, device=device)
    expected = loss_and_gradients(x, w, target, b, upstream, reduction="none")[1]
    upstream[3] = INF
    grads = loss_and_gradients(x, w, target, b, upstream, reduction="none")[1]
    others = torch.arange(13, device=device) != 3
    assert_close_rel(grads[0][others], expected[0][others], 1e-6)
    assert not grads[0][3].isfinite().any()
    assert not grads[1].isfinite().any()


def test_upstream_of_any_stride(rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device, bt=12)
    x, target = x.view(3, 4, -1), target.view(3, 4)
    base = torch.rand(4, 3, generator=rng).to(device)
    wide = torch.rand(3, 9, generator=rng).to(device)
    for upstream in (base.T, wide[:, ::2][:, :4], base[0].expand(4, 3).T, torch.ones((), device=device).expand(3, 4)):
        leaves = [t.detach().requires_grad_() for t in (x, w, b)]
        loss = syncfree_ext.linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2], reduction="none")
        grads = torch.autograd.grad(loss, leaves, upstream)
        ref = reference.linear_cross_entropy_gradients(
            x, w, target, linear_bias=b, grad_output=upstream, reduction="none"
        )
        check(loss.detach(), grads, ref)


def test_the_loss_of_a_slice(rng: torch.Generator, device: torch.device) -> None:
    """Only some rows of a loss per row are used; the others get an upstream gradient of 0."""
    x, w, target, b = small(rng, device)
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    loss = syncfree_ext.linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2], reduction="none")
    grads = torch.autograd.grad(loss[4:9].sum(), leaves)
    expected = loss_and_gradients(x[4:9], w, target[4:9], b, reduction="sum")[1]
    assert not grads[0][:4].any()
    assert not grads[0][9:].any()
    assert_close_rel(grads[0][4:9], expected[0], 1e-6)
    assert_close_rel(grads[1], expected[1], 1e-6)


# Sizes beyond 2^31 elements


def needs_memory(gib: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free >> 30} are free")


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize(
    ("bt", "h", "v", "chunk_rows"),
    [(16500, 64, 131072, 2**20), (16500, 64, 131072, None), (200, 8200, 262144, None)],
    ids=["logits", "logits in chunks", "weight"],
)
def test_more_than_2_31_elements(
    bt: int, h: int, v: int, chunk_rows: int | None, rng: torch.Generator, device: torch.device
) -> None:
    needs_memory(80)
    x = torch.randn(bt, h, device=device, dtype=torch.bfloat16)
    w = torch.randn(v, h, device=device, dtype=torch.bfloat16).mul_(h**-0.5)
    target = torch.randint(0, v, (bt,), generator=rng).to(device)
    target[-1], target[-2] = v - 1, 0
    out, grads = loss_and_gradients(x, w, target, chunk_rows=chunk_rows)
    ref = reference.linear_cross_entropy_gradients(x, w, target)
    assert_close_rel(out, ref.output.loss, 1e-4)
    # On the device: the comparison of assert_close_rel would copy tens of GB to the host.
    for grad, expected in ((grads[0], ref.dx), (grads[1], ref.dw)):
        assert expected is not None
        error = sum(
            float((g.double() - e).square().sum()) for g, e in zip(grad.split(4096), expected.split(4096), strict=True)
        )
        assert math.sqrt(error) <= 2.5e-3 * float(expected.norm())
    assert_close_rel(grads[0][-8:], ref.dx[-8:], 4e-3)
    assert_close_rel(grads[1][-8:], ref.dw[-8:], 8e-3)
