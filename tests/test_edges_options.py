"""Edges of bias, class weights, label smoothing and softcap on bfloat16 products of even shapes.

Some devices serve most of them by kernels of their own, each in its way: a bias and a softcap in the logits, label
smoothing beside the products.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import syncfree_ext
from helpers import loss_and_gradients, poisoned_memory
from syncfree_ext import reference
from tolerances import Bound, assert_close_rel, assert_equal

BT, H, V = 300, 64, 500

# "bias" and "weight" stand for tensors of that kind; see `arguments`.
OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"bias": "unit"},
    "weight": {"weight": "zeros"},
    "smoothing": {"label_smoothing": 0.1},
    "weight-smoothing": {"weight": "zeros", "label_smoothing": 0.3},
    "softcap": {"softcap": 30.0},
    "small-softcap": {"softcap": 2.0, "weight": "positive"},
    "bias-softcap": {"bias": "unit", "softcap": 10.0, "z_loss_weight": 0.01},
    "bias-smoothing": {"bias": "unit", "label_smoothing": 0.5},
    "all-smoothing": {
        "bias": "unit", "weight": "positive", "label_smoothing": 0.2, "token_scaling": True, "logit_scale": -0.5,
        "z_loss_weight": 1e-3,
    },
    "all-softcap": {
        "bias": "unit", "weight": "positive", "softcap": 15.0, "token_scaling": True, "logit_scale": -0.5,
        "z_loss_weight": 1e-3,
    },
}  # fmt: skip
ALL = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def arguments(
    options: dict[str, Any], rng: torch.Generator, device: torch.device, v: int = V
) -> tuple[Tensor | None, dict[str, Any]]:
    """The bias and the other options, with tensors for their names."""
    options = dict(options)
    bias = torch.randn(v, generator=rng).to(device) if options.pop("bias", None) else None
    if kind := options.pop("weight", None):
        weight = torch.rand(v, generator=rng) + 0.25
        if kind == "zeros":
            weight[torch.rand(v, generator=rng) < 0.3] = 0
            weight[0] = 1
        options["weight"] = weight.to(device)
    return bias, options


def problem(
    rng: torch.Generator, device: torch.device, bt: int = BT, v: int = V, h: int = H
) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(bt, h, generator=rng).to(device, torch.bfloat16)
    w = (torch.randn(v, h, generator=rng) / h**0.5).to(device, torch.bfloat16)
    target = torch.randint(0, v, (bt,), generator=rng).to(device)
    target[: bt // 10] = 0  # of a class whose weight is never 0
    return x, w, target


def compare(
    x: Tensor, w: Tensor, target: Tensor, bias: Tensor | None, upstream: Any = 1.0, **options: Any
) -> tuple[Any, tuple[Tensor | None, ...]]:
    call = {"chunk_rows": 128, **options}
    options.pop("accum_dtype", None)
    out, grads = loss_and_gradients(x, w, target, bias, upstream, **call)
    ref = reference.linear_cross_entropy_gradients(x, w, target, linear_bias=bias, grad_output=upstream, **options)
    rows = out.numel() if options.get("reduction") == "none" else len(x) if options.get("reduction") == "sum" else 1
    assert_close_rel(out, ref.output.loss, 1e-4, (1e-7 + 2.0**-22 * ref.logit_max) * math.sqrt(rows), "loss")
    bound = Bound(torch.bfloat16, ref.logit_max, exact_upstream=False)
    for name, grad, expected, noise in (
        ("dx", grads[0], ref.dx, ref.dx_noise), ("dw", grads[1], ref.dw, ref.dw_noise),
        ("db", grads[2], ref.db, ref.db_noise),
    ):  # fmt: skip
        if grad is None:
            continue
        assert_close_rel(grad, expected, bound.of(grad.dtype, noise, float(expected.norm())), 1e-30, name)
    return out, grads


@ALL
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("scored", [1, 129, 299])
def test_any_number_of_scored_rows(
    scored: int, reduction: str, options: dict[str, Any], rng: torch.Generator, device: torch.device
) -> None:
    """Ignored rows lie anywhere, and their NaN are not read."""
    x, w, target = problem(rng, device)
    bias, more = arguments(options, rng, device)
    ignored = torch.randperm(BT, generator=rng)[scored:].to(device)
    if scored == 1:
        target.fill_(0)
    target[ignored] = -100
    upstream = torch.rand(BT, generator=rng).to(device) if reduction == "none" else 0.5
    with poisoned_memory(device):
        out, grads = compare(x, w, target, bias, upstream, reduction=reduction, **more)
    assert not grads[0][ignored].any()
    x[ignored] = math.nan
    again, others = loss_and_gradients(x, w, target, bias, upstream, chunk_rows=128, reduction=reduction, **more)
    assert_equal(again.detach(), out.detach())
    for a, b in zip(grads, others, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@ALL
@pytest.mark.parametrize("bt", [1, 128, 300])
def test_nothing_to_score(bt: int, options: dict[str, Any], rng: torch.Generator, device: torch.device) -> None:
    x, w, target = problem(rng, device, bt)
    bias, more = arguments(options, rng, device)
    with poisoned_memory(device):
        out, grads = loss_and_gradients(x, w, torch.full_like(target, -100), bias, 2.0, chunk_rows=128, **more)
    assert out == 0
    assert not any(grad.any() for grad in grads if grad is not None)


@ALL
@pytest.mark.parametrize("v", [2, 65, 191, 193, 257])
def test_any_number_of_classes(v: int, options: dict[str, Any], rng: torch.Generator, device: torch.device) -> None:
    x, w, target = problem(rng, device, 200, v)
    bias, more = arguments(options, rng, device, v)
    target[-1] = v - 1
    compare(x, w, target, bias, reduction="none", **more)
    compare(x, w, target, bias, reduction="sum", **more)


@ALL
def test_one_class(options: dict[str, Any], rng: torch.Generator, device: torch.device) -> None:
    """p = 1: only the penalty has a loss and a gradient."""
    x, w, target = problem(rng, device, 200, 1)
    bias, more = arguments({k: o for k, o in options.items() if k != "z_loss_weight"}, rng, device, 1)
    out, grads = loss_and_gradients(x, w, target, bias, **more)
    assert abs(out.item()) <= 1e-6
    assert all(float(grad.abs().max()) <= 1e-6 for grad in grads if grad is not None)


@ALL
@pytest.mark.parametrize("accum", [None, torch.bfloat16], ids=["default", "lean"])
def test_several_chunks_of_a_split_sum(
    accum: torch.dtype | None, options: dict[str, Any], rng: torch.Generator, device: torch.device
) -> None:
    """A shape whose dW may be kept in fewer bits between chunks; float32 leaves have sums of their own."""
    x, w, target = problem(rng, device, 700, 512, 256)
    bias, more = arguments(options, rng, device, 512)
    target[::5] = -100
    if accum is None:
        compare(x, w, target, bias, reduction="sum", **more)
    out, grads = loss_and_gradients(x, w, target, bias, chunk_rows=256, accum_dtype=accum, **more)
    ref = reference.linear_cross_entropy_gradients(x, w, target, linear_bias=bias, **more)
    assert_close_rel(out, ref.output.loss, 1e-4, 1e-6, "loss")
    assert_close_rel(grads[0], ref.dx, 4e-3, what="dx")
    assert_close_rel(grads[1], ref.dw, 4e-3 if accum is None else 8e-3, what="dw")
    with torch.autocast(device.type, torch.bfloat16):
        _, wide = loss_and_gradients(x.float(), w.float(), target, bias, chunk_rows=256, **more)
    assert_close_rel(wide[1], ref.dw, 4e-3, what="float32 dw")
    if bias is not None:
        assert_close_rel(grads[2], ref.db, 4e-3, what="db")


@ALL
@pytest.mark.parametrize("size", [20.0, 200.0, 2000.0])
def test_targets_of_vanishing_probability(
    size: float, options: dict[str, Any], rng: torch.Generator, device: torch.device
) -> None:
    """Losses of tens to thousands of nats in some rows, while others are ordinary or all but certain."""
    x, w, target = problem(rng, device)
    bias, more = arguments({k: o for k, o in options.items() if k != "token_scaling"}, rng, device)
    rows = torch.arange(BT, device=device)
    x[rows % 3 == 0] = -size * w[target[rows % 3 == 0]]
    x[rows % 3 == 1] = size * w[target[rows % 3 == 1]]
    compare(x, w, target, bias, **more)


@pytest.mark.parametrize("softcap", [None, 5.0, 30.0])
@pytest.mark.parametrize("scale", [10.0, 100.0, 1e4])
def test_large_biases(scale: float, softcap: float | None, rng: torch.Generator, device: torch.device) -> None:
    x, w, target = problem(rng, device)
    bias = (torch.randn(V, generator=rng) * scale).to(device)
    compare(x, w, target, bias, softcap=softcap)
    target[::2] = int(bias.argmax())
    compare(x, w, target, bias, softcap=softcap, label_smoothing=0.1, reduction="sum")


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("size", [1e4, 1e20, 1e37])
def test_one_class_far_away(size: float, softcap: float | None, rng: torch.Generator, device: torch.device) -> None:
    """So far above, or below, that the exponentials of the difference vanish."""
    x, w, target = problem(rng, device)
    bias = torch.randn(V, generator=rng).to(device)
    target[:5] = 3
    for sign in (1, -1):
        bias[3] = sign * size
        compare(x, w, target, bias, softcap=softcap, reduction="none")


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_masked_classes(reduction: str, softcap: float | None, rng: torch.Generator, device: torch.device) -> None:
    """A bias of -inf takes classes out; under a softcap they stay in at -softcap."""
    x, w, target = problem(rng, device)
    bias = torch.randn(V, generator=rng).to(device)
    bias[::2] = -math.inf
    out, grads = compare(x, w, target | 1, bias, reduction=reduction, softcap=softcap)
    assert out.isfinite().all()
    if softcap is None:
        assert not grads[1][::2].any()
        assert not grads[2][::2].any()
    target[0] = 2
    out, grads = loss_and_gradients(x, w, target, bias, reduction="none", softcap=softcap)
    assert bool(out[0].isinf()) == (softcap is None)
    assert out[(target % 2) == 1].isfinite().all()
    assert grads[0][(target % 2) == 1].isfinite().all()


def test_only_the_target_is_left(rng: torch.Generator, device: torch.device) -> None:
    x, w, target = problem(rng, device)
    bias = torch.full((V,), -math.inf, device=device)
    bias[4] = 0.5
    out, grads = loss_and_gradients(x, w, torch.full_like(target, 4), bias)
    assert out == 0
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("softcap", [0.01, 0.1, 30.0, 100.0, 1e4, 1e9])
def test_softcaps_of_any_size(softcap: float, rng: torch.Generator, device: torch.device) -> None:
    """From one that all but a few logits have reached to one that changes nothing."""
    x, w, target = problem(rng, device)
    for factor in (1, 30):
        compare(x * factor, w, target, None, softcap=softcap, reduction="sum")


@pytest.mark.parametrize("smoothing", [0.01, 0.5, 0.51, 0.9, 1.0])
@pytest.mark.parametrize("size", [1.0, 0.01, 8.0])
def test_any_share_of_smoothing(size: float, smoothing: float, rng: torch.Generator, device: torch.device) -> None:
    """With small logits p is nearly 1 / V, so that smoothing takes most of it away again."""
    x, w, target = problem(rng, device)
    bias, more = arguments({"bias": "unit", "weight": "zeros"}, rng, device)
    compare(x, w * size, target, bias, label_smoothing=smoothing)
    compare(x, w * size, target, None, label_smoothing=smoothing, reduction="sum")
    compare(x, w * size, target, None, label_smoothing=smoothing, reduction="sum", **more)


def test_weights_of_zero(rng: torch.Generator, device: torch.device) -> None:
    """No row counts, so a sum is 0 and a mean is 0 / 0."""
    x, w, target = problem(rng, device)
    for smoothing in (0.0, 0.1):
        options = {"weight": torch.zeros(V, device=device), "label_smoothing": smoothing}
        out, grads = loss_and_gradients(x, w, target, None, reduction="sum", **options)
        assert out == 0
        assert not any(grad.any() for grad in grads[:2])
        out, grads = loss_and_gradients(x, w, target, None, **options)
        assert out.isnan()
        assert all(grad.isnan().all() for grad in grads[:2])


@ALL
def test_extras(options: dict[str, Any], rng: torch.Generator, device: torch.device) -> None:
    """The argmax is that of the final logits, of equals the lowest; a bias and a softcap take part."""
    x, w, target = problem(rng, device)
    bias, more = arguments(options, rng, device)
    target[::7] = -100
    ref = reference.linear_cross_entropy_gradients(x, w, target, linear_bias=bias, **more).output
    out, _ = loss_and_gradients(
        x, w, target, bias, chunk_rows=128, return_token_accuracy=True, return_predicted_tokens=True,
        return_logsumexp=True, return_z_loss=True, **more,
    )  # fmt: skip
    logits = (x.double() @ w.double().T + (0 if bias is None else bias.double())) * more.get("logit_scale", 1.0)
    top = logits.topk(2, dim=1).values
    clear = (top[:, 0] - top[:, 1] > 1e-4) & (target != -100)
    assert_equal(out.predicted_tokens[clear], ref.predicted_tokens[clear])
    assert (out.predicted_tokens[target == -100] == -1).all()
    assert_close_rel(out.token_accuracy, (out.predicted_tokens == target).float().sum() / (target != -100).sum(), 1e-6)
    assert_close_rel(out.logsumexp, ref.logsumexp, 1e-6, 1e-5, "logsumexp")
    assert_close_rel(out.z_loss, ref.z_loss, 1e-5, 1e-7, "z_loss")


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_argmax_of_equal_logits(softcap: float | None, rng: torch.Generator, device: torch.device) -> None:
    """Multiples of 1/8, so that logits are equal exactly; the bias decides, and the lowest class of equals wins."""
    x = torch.zeros(BT, H, device=device, dtype=torch.bfloat16)
    x[:, 0] = 1
    w = torch.zeros(V, H, device=device, dtype=torch.bfloat16)
    w[:, 0] = torch.randint(-8, 1, (V,), generator=rng).to(device) / 8
    bias = torch.randint(-8, 1, (V,), generator=rng).to(device) / 8
    first = int((w[:, 0].float() + bias).argmax())
    for target in (first, V - 1):
        out, _ = loss_and_gradients(
            x, w, torch.full((BT,), target, device=device), bias, softcap=softcap, return_predicted_tokens=True
        )
        assert (out.predicted_tokens == first).all()


@ALL
def test_bitwise_repeatable(options: dict[str, Any], rng: torch.Generator, device: torch.device) -> None:
    x, w, target = problem(rng, device, 700, 1000, 128)
    bias, more = arguments(options, rng, device, 1000)
    target[::3] = 7
    call = {"chunk_rows": 256, "return_predicted_tokens": True, "return_logsumexp": True, **more}
    first = loss_and_gradients(x, w, target, bias, **call)
    for _ in range(3):
        with poisoned_memory(device):
            again = loss_and_gradients(x, w, target, bias, **call)
        for a, b in zip((*first[0], *first[1]), (*again[0], *again[1]), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


@ALL
def test_gradients_do_not_depend_on_one_another(
    options: dict[str, Any], rng: torch.Generator, device: torch.device
) -> None:
    x, w, target = problem(rng, device)
    bias, more = arguments(options, rng, device)
    _, together = loss_and_gradients(x, w, target, bias, chunk_rows=128, **more)
    for i, name in enumerate("xwb"):
        _, alone = loss_and_gradients(x, w, target, bias, trainable=name, chunk_rows=128, **more)
        for j in range(3):
            assert (alone[j] is not None) == (j == i and together[j] is not None)
        if together[i] is not None:
            assert_equal(alone[i], together[i])


@pytest.mark.cuda
@ALL
def test_target_out_of_range(options: dict[str, Any], rng: torch.Generator, device: torch.device) -> None:
    """A row of NaN, and NaN in every gradient that it has part in."""
    x, w, target = problem(rng, device)
    bias, more = arguments(options, rng, device)
    target[200] = V
    out, grads = loss_and_gradients(x, w, target, bias, reduction="none", chunk_rows=128, **more)
    others = torch.arange(BT, device=device) != 200
    assert out[200].isnan()
    assert out[others].isfinite().all()
    assert grads[0][200].isnan().all()
    assert grads[0][others].isfinite().all()
    assert all(grad.isnan().all() for grad in grads[1:] if grad is not None)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=["plain", "smoothing"])
@pytest.mark.parametrize(("v", "h"), [(6400, 1096), (98500, 72)])
def test_more_than_one_pass_takes(
    v: int, h: int, options: dict[str, Any], rng: torch.Generator, device: torch.device
) -> None:
    """More columns than the lanes of a warp read at once, and more classes than a block adds up at once; neither ends
    with a whole pass.
    """
    x, w, target = problem(rng, device, 150, v, h)
    x[0], x[1] = 6 * w[v - 1], 6 * w[0]
    target[-1] = v - 1
    compare(x, w, target, None, **options)
    out = syncfree_ext.linear_cross_entropy(x, w, target, return_predicted_tokens=True, chunk_rows=128, **options)
    assert out.predicted_tokens[:2].tolist() == [v - 1, 0]
    logits = x.double() @ w.double().T
    chosen = logits.gather(1, out.predicted_tokens[:, None])[:, 0]
    # A sum of h products in float32 errs by h roundings of the sum of their absolute values at most, either of two.
    error = h * 2.0**-24 * (x.double().abs() @ w.double().abs().T).amax(1)
    assert (chosen >= logits.amax(1) - 2 * error).all()
