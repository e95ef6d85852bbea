"""The reference itself: against torch's own cross-entropy, autograd against the closed formulas, and its edges."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import pytest
import torch
import torch.nn.functional as F

from syncfree_ext import reference
from tolerances import assert_close_rel, assert_equal

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "weight": {"weight": True},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing 1": {"label_smoothing": 1.0},
    "smoothing and weight": {"label_smoothing": 0.3, "weight": True},
    "softcap": {"softcap": 1.5},
    "z": {"z_loss_weight": 0.02},
    "z, weight and items": {"z_loss_weight": 0.02, "weight": True, "num_items": 3.5},
    "z and weight": {"z_loss_weight": torch.tensor(0.02), "weight": True},
    "token weight": {"token_weight": True},
    "token scaling": {"token_scaling": True, "label_smoothing": 0.1},
    "scale": {"logit_scale": 0.37, "softcap": 2.0},
    "shift": {"shift": 2, "token_weight": True},
    "all": {
        "weight": True,
        "token_weight": True,
        "label_smoothing": 0.2,
        "softcap": 3.0,
        "z_loss_weight": 0.1,
        "token_scaling": True,
        "logit_scale": 1.3,
        "shift": 1,
        "reduction": "none",
    },
}


def problem(
    rng: torch.Generator, options: dict[str, Any], B: int = 3, T: int = 7, H: int = 5, V: int = 11
) -> tuple[Any, ...]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    target = torch.randint(0, V, (B, T), generator=rng)
    target[torch.rand(B, T, generator=rng) < 0.25] = -100
    target[0, 3] = 2
    options = dict(options)
    if options.get("weight"):
        options["weight"] = torch.rand(V, generator=rng, dtype=torch.float64) + 0.1
    if options.get("token_weight"):
        options["token_weight"] = torch.rand(B, T, generator=rng, dtype=torch.float64)
    return draw(B, T, H), draw(V, H), draw(V), target, options


@pytest.mark.parametrize("name", OPTIONS)
def test_autograd_agrees_with_the_formulas(name: str, rng: torch.Generator) -> None:
    x, w, b, target, options = problem(rng, OPTIONS[name])
    leaves = [t.requires_grad_() for t in (x, w, b)]
    extras = {f"return_{e}": True for e in ("z_loss", "token_accuracy", "predicted_tokens", "logsumexp")}
    out = reference.linear_cross_entropy(x, w, target, linear_bias=b, **options, **extras)
    upstream = torch.randn(out.loss.shape, generator=rng, dtype=torch.float64)
    grads = torch.autograd.grad(out.loss, leaves, upstream)
    # 5 rows a block: several blocks, the last one short.
    ref = reference.linear_cross_entropy_gradients(
        x, w, target, linear_bias=b, grad_output=upstream, block_rows=5, **options
    )
    for got, expected in zip(out, ref.output, strict=True):
        assert_close_rel(got, expected, 1e-13)
    assert not any(extra.requires_grad for extra in out[1:])
    for got, expected in zip(grads, (ref.dx.view_as(x), ref.dw, ref.db), strict=True):
        assert_close_rel(got, expected, 1e-12)
    logits = (x @ w.T + b).detach().requires_grad_()
    out = reference.cross_entropy(logits, target, **options, **extras)
    for got, expected in zip(out, ref.output, strict=True):
        assert_close_rel(got, expected, 1e-13)
    (grad,) = torch.autograd.grad(out.loss, logits, upstream)
    formula = reference.cross_entropy_gradients(logits, target, grad_output=upstream, block_rows=4, **options)
    assert_close_rel(formula.dx.view_as(grad), grad, 1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_agrees_with_torch(reduction: str, smoothing: float, weighted: bool, rng: torch.Generator) -> None:
    x, w, b, target, options = problem(rng, {"weight": weighted})
    logits = (x @ w.T + b).requires_grad_()
    weight = options["weight"] if weighted else None
    ours = reference.cross_entropy(logits, target, weight=weight, reduction=reduction, label_smoothing=smoothing)
    theirs = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), weight=weight, reduction=reduction, label_smoothing=smoothing
    )
    assert_close_rel(ours, theirs.view_as(ours), 1e-13)
    a, c = (torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in (ours, theirs))
    assert_close_rel(a, c, 1e-12)


def test_z_and_scaling_by_hand(rng: torch.Generator) -> None:
    x, w, b, target, _ = problem(rng, {})
    logits = 2 * torch.tanh((x @ w.T + b) * 0.7 / 2)
    lse, valid = torch.logsumexp(logits, 2), target != -100
    p = torch.gather(torch.softmax(logits, 2), 2, target.clamp(min=0)[..., None])[..., 0]
    rows = (-p.log() + 0.3 * lse**2) * p
    out = reference.linear_cross_entropy(
        x,
        w,
        target,
        linear_bias=b,
        logit_scale=0.7,
        softcap=2.0,
        z_loss_weight=0.3,
        token_scaling=True,
        return_z_loss=True,
    )
    assert_close_rel(out.loss, rows[valid].mean(), 1e-13)
    assert_close_rel(out.z_loss, (0.3 * lse**2 * p)[valid].mean(), 1e-13)


@pytest.mark.parametrize("margin", [0.0, 20.0, 60.0, 300.0])
def test_a_confident_row_keeps_its_digits(margin: float) -> None:
    """The loss and the target's gradient against 60-digit arithmetic where lse - l_t and 1 - p_t cancel."""
    logits = torch.tensor([[0.25, margin, -1.0, 0.5]], dtype=torch.float64)
    out = reference.cross_entropy_gradients(logits, torch.tensor([1]))
    with mpmath.workdps(200):
        e = [mpmath.e ** mpmath.mpf(v) for v in logits[0].tolist()]
        loss, own = float(mpmath.log(sum(e) / e[1])), -float(1 - e[1] / sum(e))
    assert float(out.output.loss) == pytest.approx(loss, rel=1e-14, abs=0)
    assert float(out.dx[0, 1]) == pytest.approx(own, rel=1e-14, abs=0)


def test_nothing_to_score(rng: torch.Generator) -> None:
    for shape, target in (((4, 3), torch.full((4,), -100)), ((0, 3), torch.empty(0, dtype=torch.int64))):
        x, w = torch.randn(shape, requires_grad=True), torch.randn(6, 3, requires_grad=True)
        for reduction in ("mean", "sum", "none"):
            loss = reference.linear_cross_entropy(x, w, target, reduction=reduction, z_loss_weight=0.1)
            assert loss.grad_fn is not None
            assert_equal(loss.detach(), torch.zeros(len(target) if reduction == "none" else ()))
            for grad in torch.autograd.grad(loss.sum(), [x, w]):
                assert not grad.any()


def test_minus_infinity_has_finite_gradients() -> None:
    """Only the target's class is left, or all but the target's."""
    x, w = (
        torch.randn(1, 3, dtype=torch.float64, requires_grad=True),
        torch.randn(4, 3, dtype=torch.float64, requires_grad=True),
    )
    for target, bias, loss in ((1, [-math.inf, 0, -math.inf, -math.inf], 0.0), (0, [-math.inf, 0, 0, 0], math.inf)):
        b = torch.tensor(bias, dtype=torch.float64, requires_grad=True)
        t = torch.tensor([target])
        out = reference.linear_cross_entropy(x, w, t, linear_bias=b)
        assert out.item() == loss
        formula = reference.linear_cross_entropy_gradients(x, w, t, linear_bias=b)
        for a, c in zip(torch.autograd.grad(out, [x, w, b]), (formula.dx, formula.dw, formula.db), strict=True):
            assert_close_rel(a, c, 1e-13, floor=1e-300)


def test_weights_that_sum_to_zero_give_nan() -> None:
    logits, target = torch.randn(3, 2), torch.tensor([0, 0, -100])
    assert reference.cross_entropy(logits, target, weight=torch.tensor([0.0, 1.0])).isnan()
    assert reference.cross_entropy(logits, target, weight=torch.tensor([0.0, 1.0]), num_items=0) == 0


def test_errors() -> None:
    x, w, t = torch.randn(4, 3), torch.randn(5, 3), torch.zeros(4, dtype=torch.int64)
    for error, arguments, options in (
        (ValueError, (x, w[:0], t), {}),
        (ValueError, (x, w[:, :2], t), {}),
        (ValueError, (x, w, t[:3]), {}),
        (TypeError, (x, w, t.float()), {}),
        (IndexError, (x, w, t + 5), {}),
        (ValueError, (x, w, t), {"reduction": "avg"}),
        (ValueError, (x, w, t), {"num_items": 1, "reduction": "sum"}),
        (ValueError, (x, w, t), {"label_smoothing": 1.5}),
        (ValueError, (x, w, t), {"softcap": 0.0}),
        (ValueError, (x, w, t), {"shift": -1}),
        (ValueError, (x, w, t), {"chunk_rows": 0}),
        (ValueError, (x, w, t), {"weight": torch.ones(5, requires_grad=True)}),
    ):
        with pytest.raises(error, match="linear_cross_entropy: "):
            reference.linear_cross_entropy(*arguments, **options)


def test_counts_and_scale() -> None:
    target = torch.tensor([[1, -100, 0], [2, 2, -100]], dtype=torch.int32)
    weight = torch.tensor([0.5, 1.0, -2.0])
    counts, rows = reference.count_targets(target, 3, weight=weight, token_weight=torch.arange(6.0).view(2, 3), shift=1)
    # Row 0 sees -100, row 1 sees 0, row 3 sees 2, row 4 sees -100; rows 2 and 5 end their sequences.
    assert rows.tolist() == [1, 3, 0, 2, 4, 5]
    assert rows.dtype == torch.int32
    assert counts.tolist() == pytest.approx([2, -1.5, -0.5, -1 / 1.5, 0.5, 2, 4, 0])
    grads = [torch.tensor([[1.0, 3.0], [5.0, 7.0]]).bfloat16(), torch.tensor([2.0])]
    reference.scale_unless_one_(grads, torch.tensor(0.5), [torch.tensor([2.0, 4.0]), torch.empty(0)])
    assert grads[0].tolist() == [[1, 3], [10, 14]]
    assert grads[1].tolist() == [1]
