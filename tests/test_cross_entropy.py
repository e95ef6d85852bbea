"""cross_entropy of logits that the caller owns: values, gradients, memory, strides, options."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import syncfree_ext
from cases import DTYPES, covering_array, layout
from helpers import ALL_EXTRAS, poisoned_memory
from syncfree_ext import reference
from tolerances import ROUNDOFF, Bound, assert_close_rel, assert_equal, loss_tolerance, smallest_error

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "dtype": tuple(DTYPES),
    "shape": ((1,), (7,), (3, 43), (1000,), (2, 5, 3)),
    "v": (1, 2, 17, 513, 4099, 32003),
    "size": (1.0, 10.0),
    "reduction": ("mean", "mean/number", "mean/tensor", "sum", "none"),
    "ignored": ("no", "some", "class"),
    "weight": ("no", "float32", "same", "zeros"),
    "token_weight": ("no", "float32", "same"),
    "label_smoothing": (0.0, 0.1, 1.0),
    "softcap": (None, 30.0, 2.0),
    "token_scaling": (False, True),
    "logit_scale": (1.0, 0.5, "tensor"),
    "z_loss_weight": (0.0, 1e-3, "tensor"),
    "shift": (0, 1, 3),
    "layout": ("contiguous", "transposed", "strided", "offset", "pitched"),
    "target": ("int64", "int32", "strided"),
    "upstream": (1.0, 0.75, 256.0),
}
ARRAY = covering_array(DIMENSIONS)


def build(
    case: dict[str, Any], rng: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """logits, target, upstream gradient, options."""
    dtype, shape, v = DTYPES[case["dtype"]], case["shape"], case["v"]
    logits = (torch.randn(*shape, v, generator=rng) * case["size"]).to(dtype)
    target = torch.randint(0, v, shape, generator=rng)
    options: dict[str, Any] = {name: case[name] for name in ("label_smoothing", "softcap", "token_scaling", "shift")}
    options["reduction"] = case["reduction"].split("/")[0]
    if case["ignored"] == "some":
        target[torch.rand(shape, generator=rng) < 0.3] = -100
    elif case["ignored"] == "class":
        options["ignore_index"] = 0
    if case["weight"] != "no":
        weight = torch.rand(v, generator=rng) + 0.25
        if case["weight"] == "zeros":
            weight[1::3] = 0
        options["weight"] = weight.to(dtype if case["weight"] == "same" else torch.float32)
    if case["token_weight"] != "no":
        token_weight = torch.rand(shape, generator=rng) + 0.125
        options["token_weight"] = token_weight.to(dtype if case["token_weight"] == "same" else torch.float32)
    rows = math.prod(shape)
    if case["reduction"] == "mean/number":
        options["num_items"] = 0.6 * rows + 0.7
    elif case["reduction"] == "mean/tensor":
        options["num_items"] = torch.tensor(rows // 2 + 1)
    for name, value in (("logit_scale", 0.7), ("z_loss_weight", 2e-3)):
        options[name] = torch.tensor(value) if case[name] == "tensor" else case[name]
    upstream = torch.tensor(case["upstream"])
    if options["reduction"] == "none":
        upstream = torch.randn(shape, generator=rng) * upstream
    upstream = upstream.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    target = target.int() if case["target"] == "int32" else target
    return (
        layout(logits.to(device), case["layout"]),
        layout(target.to(device), "strided" if case["target"] == "strided" else "contiguous"),
        layout(upstream, "strided"),
        {k: value.to(device) if isinstance(value, Tensor) else value for k, value in options.items()},
    )


def compare(logits: Tensor, target: Tensor, upstream: Tensor, options: dict[str, Any]) -> None:
    leaf = logits.detach().requires_grad_()
    before = logits.clone()
    out = syncfree_ext.cross_entropy(leaf, target, **options, **ALL_EXTRAS)
    (grad,) = torch.autograd.grad(out.loss, leaf, upstream)
    ref = reference.cross_entropy_gradients(logits, target, grad_output=upstream, **options)
    expected = ref.output
    scored = expected.predicted_tokens != -1
    n = int(scored.sum())
    for name, rows in (("loss", n if options["reduction"] != "mean" else 1), ("z_loss", n), ("logsumexp", n)):
        got, want = getattr(out, name), getattr(expected, name)
        assert got.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
        # Logits are given, not summed: half types are no less exact here than float32.
        tol = loss_tolerance(torch.float64 if got.dtype == torch.float64 else torch.float32, want, ref.logit_max, rows)
        assert_close_rel(got, want, 0.0, tol, name)
        assert name == "loss" or not got.requires_grad

    # The argmax of what the caller gave is exact, up to ties that rounding in float32 makes.
    assert_equal(out.predicted_tokens == -1, ~scored)
    best = logits.double().gather(-1, expected.predicted_tokens.clamp(min=0)[..., None])[..., 0]
    ours = logits.double().gather(-1, out.predicted_tokens.clamp(min=0)[..., None])[..., 0]
    scale, cap = torch.as_tensor(options["logit_scale"]).double().to(best), options["softcap"]
    if cap is None:
        assert torch.equal(ours, best)
    else:
        assert float((torch.tanh(best * scale / cap) - torch.tanh(ours * scale / cap)).abs().max()) < 1e-6

    assert grad.dtype == logits.dtype
    assert grad.shape == logits.shape
    # Nothing but the result is rounded, whatever the upstream gradient.
    arithmetic = 1e-12 if logits.dtype == torch.float64 else 1e-5 * max(1.0, ref.logit_max / 32)
    floor = 2.0**-25 * math.sqrt(grad.numel()) if logits.dtype == torch.float16 else 1e-30
    assert_close_rel(grad, ref.dx.view(grad.shape), ROUNDOFF[logits.dtype] + arithmetic, floor, "gradient")
    assert not grad[~scored].any()
    assert_equal(logits, before, "logits after the call")
    assert grad.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()


@pytest.mark.parametrize("case", ARRAY, ids=[f"{i:02}-{c['dtype']}-{c['shape']}-{c['v']}" for i, c in enumerate(ARRAY)])
def test_covering_array(case: dict[str, Any], rng: torch.Generator, device: torch.device) -> None:
    if device.type == "cuda" and case["dtype"] == "float64":
        case = {**case, "dtype": "float32"}
    compare(*build(case, rng, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_against_torch(dtype: torch.dtype, reduction: str, rng: torch.Generator, device: torch.device) -> None:
    logits = torch.randn(64, 301, generator=rng).to(device, dtype).requires_grad_()
    target = torch.randint(0, 301, (64,), generator=rng).to(device)
    target[::5] = -100
    weight = torch.rand(301, generator=rng).to(device)
    options: dict[str, Any] = {"weight": weight, "label_smoothing": 0.1, "reduction": reduction}
    ours = syncfree_ext.cross_entropy(logits, target, **options)
    wide = logits.detach().float().requires_grad_()
    theirs = F.cross_entropy(wide, target, **options)
    assert_close_rel(ours, theirs, 1e-5)
    upstream = torch.rand(ours.shape, generator=rng).to(device)
    (a,), (b,) = torch.autograd.grad(ours, logits, upstream), torch.autograd.grad(theirs, wide, upstream)
    assert_close_rel(a, b, ROUNDOFF[dtype] + 1e-5, smallest_error(dtype, a.numel()))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_each_backward_returns_a_fresh_gradient(reduction: str, rng: torch.Generator, device: torch.device) -> None:
    """With retain_graph the second upstream gradient does not see the first, and what was returned stays."""
    logits = torch.randn(9, 31, generator=rng).to(device).requires_grad_()
    loss = syncfree_ext.cross_entropy(logits, torch.arange(9, device=device), reduction=reduction)
    kept = []
    for upstream in (2.0, 3.0, 1.0, 1.0):
        (grad,) = torch.autograd.grad(loss, logits, torch.full_like(loss, upstream), retain_graph=True)
        kept.append((upstream, grad, grad.clone()))
    assert len({grad.data_ptr() for _, grad, _ in kept}) == len(kept)
    for upstream, grad, copy in kept:
        assert_equal(grad, copy)
        assert_close_rel(grad, kept[-1][1] * upstream, 1e-6)


def test_changing_the_logits_between_forward_and_backward_is_noticed(device: torch.device) -> None:
    """Backward reads the logits again; autograd's version counter must catch a write in between."""
    base = torch.randn(4, 9, device=device, requires_grad=True)
    logits = base * 1
    loss = syncfree_ext.cross_entropy(logits, torch.arange(4, device=device))
    logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_gradient_is_computed_without_need(device: torch.device) -> None:
    target = torch.arange(4, device=device)
    assert not syncfree_ext.cross_entropy(torch.randn(4, 9, device=device), target).requires_grad
    with torch.no_grad():
        leaf = torch.randn(4, 9, device=device, requires_grad=True)
        assert not syncfree_ext.cross_entropy(leaf, target).requires_grad
    with torch.inference_mode():
        assert syncfree_ext.cross_entropy(leaf, target).isfinite()


def test_expanded_logits(rng: torch.Generator, device: torch.device) -> None:
    row = torch.randn(1, 33, generator=rng).to(device)
    options: dict[str, Any] = {"reduction": "mean", "logit_scale": 1.0, "softcap": None}
    target = torch.randint(0, 33, (12,), generator=rng).to(device)
    compare(row.expand(12, 33), target, torch.ones((), device=device), options)
    compare(row[:, :1].expand(12, 33), target[:1].expand(12), torch.ones((), device=device), options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(0,), (0, 5), (2, 0)], ids=str)
def test_no_rows(shape: tuple[int, ...], reduction: str, device: torch.device) -> None:
    logits = torch.empty(*shape, 7, device=device, requires_grad=True)
    target = torch.empty(shape, dtype=torch.int64, device=device)
    with poisoned_memory(device):
        out = syncfree_ext.cross_entropy(logits, target, reduction=reduction, **ALL_EXTRAS)
        out.loss.sum().backward()
    assert not out.loss.any()
    assert logits.grad is not None
    assert logits.grad.shape == logits.shape
    if reduction != "none":
        assert out.token_accuracy == 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows_are_written(reduction: str, rng: torch.Generator, device: torch.device) -> None:
    """Their gradient is 0, in memory that held NaN; the values of these rows are not read."""
    logits = torch.randn(50, 1003, generator=rng).to(device)
    target = torch.randint(0, 1003, (50,), generator=rng).to(device)
    target[::3] = -100
    logits[::3] = math.nan
    leaf = logits.requires_grad_()
    with poisoned_memory(device):
        out = syncfree_ext.cross_entropy(leaf, target, reduction=reduction, **ALL_EXTRAS)
        out.loss.sum().backward()
    assert out.loss.isfinite().all()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
    assert not leaf.grad[::3].any()
    assert leaf.grad[1::3].any(1).all()


@pytest.mark.parametrize("bad", [33, -1, 2**31, 2**63 - 1, -(2**63)])
def test_target_out_of_range(bad: int, rng: torch.Generator, device: torch.device) -> None:
    logits = torch.randn(6, 33, generator=rng).to(device).requires_grad_()
    target = torch.arange(6, device=device)
    target[2] = bad
    if device.type == "cpu":
        with pytest.raises(IndexError, match=rf"target.*33.*{bad}"):
            syncfree_ext.cross_entropy(logits, target)
        return
    loss = syncfree_ext.cross_entropy(logits, target, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    torch.cuda.synchronize()
    others = torch.arange(6, device=device) != 2
    assert loss[2].isnan()
    assert grad[2].isnan().all()
    assert loss[others].isfinite().all()
    assert grad[others].isfinite().all()
    assert syncfree_ext.cross_entropy(logits, target).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("margin", [2.2, 7.0, 14.0, 30.0])
def test_a_probability_close_to_one(margin: float, dtype: torch.dtype, device: torch.device) -> None:
    """1 - p_t to full precision; rounding p_t to bfloat16 first would make it 0 from a margin of 6 on."""
    logits = torch.full((1, 5), -1.0, dtype=dtype, device=device)
    logits[0, 2] = margin
    target, upstream = torch.tensor([2], device=device), torch.tensor(2.0**40 if dtype != torch.float16 else 2.0**14)
    ref = reference.cross_entropy_gradients(logits, target, grad_output=upstream)
    leaf = logits.requires_grad_()
    loss = syncfree_ext.cross_entropy(leaf, target)
    (grad,) = torch.autograd.grad(loss, leaf, upstream.to(device))
    assert_close_rel(loss, ref.output.loss, 1e-6)
    floor = 2.0**-25 if dtype == torch.float16 else 0.0
    assert_close_rel(grad[0, 2], ref.dx[0, 2], ROUNDOFF[dtype] + 1e-6, floor)


def test_minus_infinity(rng: torch.Generator, device: torch.device) -> None:
    logits = torch.randn(8, 20, generator=rng)
    logits[:, ::2] = -math.inf
    logits = logits.to(device)
    for target in (torch.tensor([1, 3, 5, 7, 9, 11, 13, 15]), torch.tensor([0, 2, 4, 6, 8, 10, 12, 14])):
        target = target.to(device)
        ref = reference.cross_entropy_gradients(logits, target, reduction="none")
        leaf = logits.clone().requires_grad_()
        loss = syncfree_ext.cross_entropy(leaf, target, reduction="none")
        (grad,) = torch.autograd.grad(loss, leaf, torch.ones_like(loss))
        assert_equal(loss.isinf(), ref.output.loss.isinf())
        assert_close_rel(grad, ref.dx, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_repeatable(dtype: torch.dtype, rng: torch.Generator, device: torch.device) -> None:
    logits = torch.randn(300, 5003, generator=rng).to(device, dtype).requires_grad_()
    target = torch.randint(0, 5003, (300,), generator=rng).to(device)
    results = []
    for _ in range(4):
        out = syncfree_ext.cross_entropy(logits, target, label_smoothing=0.1, z_loss_weight=0.1, **ALL_EXTRAS)
        results.append((*out, *torch.autograd.grad(out.loss, logits)))
    for again in results[1:]:
        for a, b in zip(again, results[0], strict=True):
            assert_equal(a, b)


def test_agrees_with_the_fused_loss(rng: torch.Generator, device: torch.device) -> None:
    """The same options on logits formed by the caller."""
    x, w = torch.randn(40, 16, generator=rng).to(device), torch.randn(90, 16, generator=rng).to(device)
    target = torch.randint(0, 90, (40,), generator=rng).to(device)
    options: dict[str, Any] = {
        "label_smoothing": 0.1, "softcap": 5.0, "z_loss_weight": 0.01, "token_scaling": True, "logit_scale": 0.7,
    }  # fmt: skip
    a = syncfree_ext.linear_cross_entropy(x, w, target, **options, **ALL_EXTRAS)
    c = syncfree_ext.cross_entropy((x.double() @ w.double().T).float(), target, **options, **ALL_EXTRAS)
    for p, q in zip(a, c, strict=True):
        assert_close_rel(p, q, 1e-5)


@pytest.mark.cuda
@pytest.mark.slow
def test_more_than_2_31_logits(rng: torch.Generator, device: torch.device) -> None:
    rows, v = 16500, 131072
    if torch.cuda.mem_get_info()[0] < 50 * 2**30:
        pytest.skip("needs 50 GiB of GPU memory")
    logits = torch.randn(rows, v, device=device, dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(0, v, (rows,), generator=rng).to(device)
    loss = syncfree_ext.cross_entropy(logits, target, reduction="none")
    (grad,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
    for part in (slice(0, 64), slice(rows - 64, rows)):
        ref = reference.cross_entropy_gradients(logits.detach()[part], target[part], reduction="none")
        assert_close_rel(loss[part], ref.output.loss, 1e-6)
        assert_close_rel(grad[part], ref.dx, Bound(torch.float32, 8.0).of(torch.bfloat16, 1.0, 1.0))
