"""Autograd of the losses in eager mode: what backward returns, keeps, frees and refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import syncfree_ext as sf
from autograd_problem import CLASSES, LOSSES, ROWS, Problem, Recorder, assert_close, collector_off, grad


@pytest.fixture
def problem(device: torch.device, rng: torch.Generator) -> Problem:
    return Problem(device, rng)


# ------------------------------------------------------------------------------------------------- upstream gradients


@LOSSES
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("upstream", [1.0, 2.0, 3.0, -0.37, 0.0])
def test_upstream_scalar(problem: Problem, function: Callable[..., Tensor], reduction: str, upstream: float) -> None:
    gradients = grad(function(problem, reduction), problem.leaves, upstream)
    assert_close(gradients, problem.reference(upstream, reduction))


@LOSSES
def test_upstream_inf(problem: Problem, function: Callable[..., Tensor]) -> None:
    gradients = grad(function(problem), problem.leaves, float("inf"))
    for gradient, finite in zip(gradients, problem.reference(), strict=True):
        assert not torch.isfinite(gradient[finite != 0]).any()


def per_row_upstreams(device: torch.device, rng: torch.Generator) -> dict[str, Tensor]:
    random = torch.randn(3 * ROWS, generator=rng).to(device)
    return {
        "contiguous": random[:ROWS],
        "strided": random[::3],
        "expanded": random[:1].expand(ROWS),
        "zero": torch.zeros(ROWS, device=device),
    }


@LOSSES
@pytest.mark.parametrize("layout", ["contiguous", "strided", "expanded", "zero"])
def test_upstream_per_row(
    problem: Problem, function: Callable[..., Tensor], layout: str, device: torch.device, rng: torch.Generator
) -> None:
    upstream = per_row_upstreams(device, rng)[layout]
    gradients = grad(function(problem, "none"), problem.leaves, upstream)
    assert_close(gradients, problem.reference(upstream, "none"))


@LOSSES
def test_upstream_of_reshaped_rows(problem: Problem, function: Callable[..., Tensor]) -> None:
    """sum() gives an expanded 0-D gradient, which a kernel that reads with stride 1 would overrun."""
    function(problem, "none").view(4, 6).t().sum().backward()
    assert_close([leaf.grad for leaf in problem.leaves], problem.reference(1.0, "none"))


# -------------------------------------------------------------------------------------------------- repeated backward


@LOSSES
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_backward_is_like_the_first(
    problem: Problem, function: Callable[..., Tensor], reduction: str, device: torch.device
) -> None:
    loss = function(problem, reduction)
    returned, copies = [], []
    for upstream in (1.0, 2.0, 3.0, 0.0, 1.0, float("inf"), 2.0):
        gradients = grad(loss, problem.leaves, upstream, retain_graph=True)
        if upstream != float("inf"):
            assert_close(gradients, problem.reference(upstream, reduction))
        returned.append(gradients)
        copies.append([gradient.clone() for gradient in gradients])
        for kept, copy in zip(returned, copies, strict=True):
            for a, b in zip(kept, copy, strict=True):
                assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)), "a returned gradient changed"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_options_reach_every_backward(problem: Problem, reduction: str, rng: torch.Generator) -> None:
    """Every option that backward must remember, with the two losses as each other's witness."""
    device = problem.input.device
    options = {
        "weight": torch.rand(CLASSES, generator=rng).to(device),
        "token_weight": torch.rand(ROWS, generator=rng).to(device),
        "num_items": torch.tensor(7, device=device) if reduction == "mean" else None,
        "label_smoothing": 0.1,
        "softcap": 3.0,
        "token_scaling": True,
        "logit_scale": torch.tensor(0.7, device=device),
        "z_loss_weight": torch.tensor(0.1, device=device),
        "ignore_index": int(problem.target[1]),
        "shift": 1,
    }
    problem.target[problem.target < 0] = 0
    linear, logits = problem.loss(reduction, **options), problem.logits_loss(reduction, **options)
    first = grad(linear.sum(), problem.leaves, 3.0, retain_graph=True)
    assert_close(grad(linear.sum(), problem.leaves, 3.0), first)
    assert_close(grad(logits.sum(), problem.leaves, 3.0), first)
    plain = problem.loss(reduction, ignore_index=options["ignore_index"]).sum()
    for name in options:
        if options[name] is not None and name != "ignore_index":
            changed = problem.loss(reduction, **{name: options[name], "ignore_index": options["ignore_index"]}).sum()
            assert not torch.allclose(
                grad(changed, [problem.weight])[0], grad(plain, [problem.weight], retain_graph=True)[0]
            )


@pytest.mark.parametrize("upstreams", [(2.0, 3.0), (1.0, 1.0), (3.0, 1.0)])
def test_backward_twice_accumulates(problem: Problem, upstreams: tuple[float, float]) -> None:
    loss = problem.loss()
    for upstream in upstreams:
        (loss * upstream).backward(retain_graph=True)
    assert_close([leaf.grad for leaf in problem.leaves], problem.reference(sum(upstreams)))


@LOSSES
def test_backward_in_the_calling_thread(problem: Problem, function: Callable[..., Tensor]) -> None:
    """Without autograd's own threads for a GPU; and forward may have run with them."""
    with torch.autograd.set_multithreading_enabled(False):
        (2.0 * function(problem)).backward()
    loss = function(problem)
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward()
    assert_close([leaf.grad for leaf in problem.leaves], problem.reference(3.0))


def test_one_leaf_at_a_time(problem: Problem) -> None:
    loss = problem.loss()
    gradients = [grad(loss, [leaf], 3.0, retain_graph=True)[0] for leaf in problem.leaves]
    assert_close(gradients, problem.reference(3.0))


@LOSSES
def test_backward_through_a_freed_graph_raises(problem: Problem, function: Callable[..., Tensor]) -> None:
    loss = function(problem)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_two_losses_share_leaves(problem: Problem) -> None:
    (problem.loss() + 2 * problem.loss("sum")).backward()
    expected = [a + b for a, b in zip(problem.reference(1.0), problem.reference(2.0, "sum"), strict=True)]
    assert_close([leaf.grad for leaf in problem.leaves], expected)


def test_microbatches_accumulate(problem: Problem) -> None:
    for upstream in (1.0, 1.0, 0.5):
        (upstream * problem.loss()).backward()
    assert_close([leaf.grad for leaf in problem.leaves], problem.reference(2.5))


def test_changed_input_is_found_when_it_is_needed(problem: Problem) -> None:
    loss = problem.loss()
    with torch.no_grad():
        problem.weight.mul_(2)
    grad(loss, problem.leaves, 2.0, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad(loss, problem.leaves, 2.0)


@pytest.mark.parametrize("changed", ["input", "weight", "target"])
def test_changed_input_of_per_row_loss_is_found(problem: Problem, changed: str) -> None:
    loss = problem.loss("none")
    with torch.no_grad():
        getattr(problem, changed).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_scaling_counts_as_a_write(device: torch.device) -> None:
    gradient = torch.ones(5, device=device)
    version = gradient._version
    torch.ops.syncfree.scale_unless_one_([gradient], torch.tensor(2.0, device=device), [])
    assert gradient._version > version
    assert torch.equal(gradient, torch.full_like(gradient, 2))


# ---------------------------------------------------------------------------------------------------- double backward


@LOSSES
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("upstream_requires_grad", [False, True])
@pytest.mark.parametrize("wrt", ["input", "weight"])
def test_double_backward_raises(
    problem: Problem, function: Callable[..., Tensor], reduction: str, upstream_requires_grad: bool, wrt: str
) -> None:
    loss = function(problem, reduction)
    upstream = torch.ones_like(loss).requires_grad_(upstream_requires_grad)
    gradients = grad(loss, problem.leaves, upstream, create_graph=True)
    assert_close(gradients, problem.reference(1.0, reduction))
    for gradient in gradients:
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            torch.autograd.grad(gradient.square().sum(), getattr(problem, wrt), retain_graph=True)


def test_double_backward_of_a_recomputed_gradient_raises(problem: Problem) -> None:
    loss = problem.loss()
    grad(loss, problem.leaves, retain_graph=True)
    gradients = grad(loss, problem.leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        gradients[0].sum().backward()


def test_double_backward_of_a_raw_gradient_raises(problem: Problem) -> None:
    one = torch.ones((), device=problem.input.device)
    dx, _, _ = torch.ops.syncfree.flce_backward(one, problem.input, problem.weight, problem.target, need_dx=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dx.sum().backward()


# -------------------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "frozen", [c for n in range(4) for c in itertools.combinations(("input", "weight", "bias"), n)], ids="-".join
)
def test_each_leaf_is_gated_on_its_own(
    device: torch.device, rng: torch.Generator, reduction: str, frozen: tuple[str, ...]
) -> None:
    problem = Problem(device, rng, frozen=frozen)
    trainable = tuple(name not in frozen for name in ("input", "weight", "bias"))
    with Recorder() as recorder:
        loss = problem.loss(reduction)
        assert loss.requires_grad == any(trainable)
        if any(trainable):
            loss.sum().backward()
    flags = recorder.arguments("syncfree::flce_forward")
    asked = tuple(bool(flags.get(name)) for name in ("need_dx", "need_dw", "need_db"))
    assert asked == (trainable if reduction != "none" else (False, False, False))
    if reduction == "none" and any(trainable):
        flags = recorder.arguments("syncfree::flce_backward")
        assert tuple(bool(flags.get(name)) for name in ("need_dx", "need_dw", "need_db")) == trainable
    for leaf, expected, needed in zip(problem.leaves, problem.reference(1.0, reduction), trainable, strict=True):
        if needed:
            assert_close([leaf.grad], [expected])
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradient_is_computed_without_grad_mode(problem: Problem, mode: Any) -> None:
    with mode(), Recorder() as recorder:
        loss = problem.loss()
    assert not loss.requires_grad
    flags = recorder.arguments("syncfree::flce_forward")
    assert not any(flags.get(name) for name in ("need_dx", "need_dw", "need_db"))
    assert_close([loss], [problem.loss().detach()])


def largest_allocation(device: torch.device, function: Callable[[], Any]) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    return max((event.nbytes() for event in events if event.name() == "[memory]"), default=0)


def test_frozen_weight_costs_no_weight_sized_buffer(device: torch.device) -> None:
    classes, hidden, rows = 4096, 256, 8
    weight = torch.randn(classes, hidden, device=device) / 16
    target = torch.arange(rows, device=device)

    def step(trainable: bool) -> None:
        weight.requires_grad_(trainable)
        leaf = torch.randn(rows, hidden, device=device, requires_grad=True)
        sf.linear_cross_entropy(leaf, weight, target).backward()

    for trainable in (True, False):  # warm up: libraries may allocate once
        step(trainable)
    weight.grad = None
    size = weight.numel() * weight.element_size()
    assert largest_allocation(device, lambda: step(False)) < size
    assert largest_allocation(device, lambda: step(True)) >= size, "the measurement does not see the gradient"


def test_eager_scales_in_place_and_gives_away(problem: Problem) -> None:
    """No copy of a gradient is made: the buffers that forward filled become the .grad of the leaves."""
    with Recorder() as recorder:
        (2 * problem.loss()).backward()
    assert recorder.names.count("syncfree::scale_unless_one_") == 1
    after_forward = recorder.names[recorder.names.index("syncfree::flce_forward") + 1 :]
    assert not [name for name in after_forward if name.startswith(("aten::clone", "aten::_to_copy", "aten::add"))]
    pointers = recorder.pointers["syncfree::flce_forward"][5:8]
    assert [leaf.grad.data_ptr() for leaf in problem.leaves] == pointers


def test_extras_carry_no_gradient(problem: Problem) -> None:
    flags = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "return_logsumexp")
    for reduction, function in itertools.product(("mean", "sum", "none"), (problem.loss, problem.logits_loss)):
        output = function(reduction, z_loss_weight=0.1, **dict.fromkeys(flags, True))
        assert output.loss.requires_grad
        assert not any(extra.requires_grad for extra in output[1:])
        bare = function(reduction, z_loss_weight=0.1)
        assert torch.equal(bare, output.loss)
        gradients = grad(output.loss.sum(), problem.leaves)
        for a, b in zip(gradients, grad(bare.sum(), problem.leaves), strict=True):
            assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("backward", ["none", "once", "retained"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_are_freed_by_reference_counts(problem: Problem, backward: str, reduction: str) -> None:
    with collector_off():
        with Recorder() as recorder:
            loss = problem.loss(reduction)
            if backward != "none":
                loss.sum().backward(retain_graph=backward == "retained")
        kept = [ref for refs in recorder.storages.values() for ref in refs]
        assert kept
        for leaf in problem.leaves:
            leaf.grad = None
        del loss
        assert all(ref.expired() for ref in kept)


def test_gradients_are_freed_when_extras_outlive_the_loss(problem: Problem) -> None:
    with collector_off():
        with Recorder() as recorder:
            output = problem.loss(return_logsumexp=True, return_token_accuracy=True)
        extras = output[2], output[4]
        del output
        assert all(ref.expired() for ref in recorder.storages["syncfree::flce_forward"][5:8])
        assert len(extras) == 2


def test_saved_gradient_is_given_up_by_the_first_backward(problem: Problem) -> None:
    """With a retained graph too: it belongs to the leaf then."""
    with collector_off():
        with Recorder() as recorder:
            loss = problem.loss()
            loss.backward(retain_graph=True)
        for leaf in problem.leaves:
            leaf.grad = None
        assert all(ref.expired() for ref in recorder.storages["syncfree::flce_forward"][5:8])
        assert loss.requires_grad
