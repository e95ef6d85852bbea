"""The losses among the rest of autograd: autocast, checkpoint, hooks, transforms, DTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import syncfree_ext as sf
from autograd_problem import CLASSES, LOSSES, ROWS, Problem, Recorder, assert_close, grad


@pytest.fixture
def problem(device: torch.device, rng: torch.Generator) -> Problem:
    return Problem(device, rng)


# ---------------------------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_casts_input_and_weight_alone(problem: Problem, dtype: torch.dtype, reduction: str) -> None:
    device = problem.input.device.type
    with torch.autocast(device, dtype):
        with Recorder() as recorder:
            loss = problem.loss(reduction)
        expected = F.cross_entropy(F.linear(*problem.leaves).float(), problem.target, reduction=reduction)
    flags = recorder.arguments("syncfree::flce_forward")
    assert flags["compute_dtype"] == dtype
    assert loss.dtype == torch.float32
    assert_close([loss], [expected], 1e-2)
    loss.sum().backward()  # outside autocast, where it must still multiply in `dtype`
    for leaf, reference in zip(problem.leaves, problem.reference(1.0, reduction), strict=True):
        assert leaf.grad.dtype == torch.float32
        assert_close([leaf.grad], [reference], 2e-2)


def test_recomputation_remembers_autocast(problem: Problem) -> None:
    device = problem.input.device.type
    with torch.autocast(device, torch.bfloat16):
        loss = problem.loss()
    first = grad(loss, problem.leaves, retain_graph=True)
    second = grad(loss, problem.leaves)
    assert_close(second, first, 1e-5)


def test_autocast_takes_mixed_dtypes(problem: Problem) -> None:
    device = problem.input.device.type
    half = problem.input.detach().bfloat16().requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        loss = sf.linear_cross_entropy(half, problem.weight, problem.target, linear_bias=problem.bias)
    loss.backward()
    assert (half.grad.dtype, problem.weight.grad.dtype) == (torch.bfloat16, torch.float32)
    with pytest.raises(TypeError, match="dtype of input"):
        sf.linear_cross_entropy(half, problem.weight, problem.target)


def test_autocast_leaves_float64_alone(rng: torch.Generator) -> None:
    problem = Problem(torch.device("cpu"), rng, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = problem.loss()
        with pytest.raises(TypeError, match="dtype of input"):
            sf.linear_cross_entropy(problem.input, problem.weight.float(), problem.target)
    assert loss.dtype == torch.float64
    loss.backward()
    assert_close([leaf.grad for leaf in problem.leaves], problem.reference(), 1e-12)


@pytest.mark.parametrize("upstream", [1.0, 3.0, 2.0**12])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients(device: torch.device, rng: torch.Generator, dtype: torch.dtype, upstream: float) -> None:
    problem = Problem(device, rng, dtype)
    loss = problem.loss()
    expected = problem.reference(upstream)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3
    for _ in range(2):
        gradients = grad(loss, problem.leaves, upstream, retain_graph=True)
        assert all(gradient.dtype == dtype for gradient in gradients)
        assert_close(gradients, expected, tolerance)


# ------------------------------------------------------------------------------------------ other parts of autograd


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_checkpoint(problem: Problem, use_reentrant: bool, reduction: str) -> None:
    def head(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        hidden = torch.tanh(input)
        loss = sf.linear_cross_entropy(hidden, weight, problem.target, linear_bias=bias, reduction=reduction)
        return loss.sum()

    expected = grad(head(*problem.leaves), problem.leaves, 3.0)
    actual = grad_of_backward(checkpoint(head, *problem.leaves, use_reentrant=use_reentrant), problem.leaves, 3.0)
    assert_close(actual, expected)


def grad_of_backward(loss: Tensor, leaves: Any, upstream: float) -> list[Tensor]:
    (loss * upstream).backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_saved_tensor_hooks(problem: Problem, reduction: str) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = problem.loss(reduction).sum()
    for upstream in (2.0, 3.0):
        assert_close(grad(loss, problem.leaves, upstream, retain_graph=True), problem.reference(upstream, reduction))


def test_non_leaf_inputs(problem: Problem) -> None:
    scaled = [leaf * 2 for leaf in problem.leaves]
    sf.linear_cross_entropy(scaled[0], scaled[1], problem.target, linear_bias=scaled[2]).backward()
    leaves = [leaf.detach().double().requires_grad_() for leaf in problem.leaves]
    F.cross_entropy(F.linear(*(leaf * 2 for leaf in leaves)), problem.target).backward()
    assert_close([leaf.grad for leaf in problem.leaves], [leaf.grad for leaf in leaves])


def test_empty_rows_have_zero_gradients(problem: Problem) -> None:
    for reduction in ("mean", "sum", "none"):
        empty = problem.input[:0].detach().requires_grad_()
        loss = sf.linear_cross_entropy(empty, problem.weight, problem.target[:0], reduction=reduction)
        dx, dw = torch.autograd.grad(loss.sum(), (empty, problem.weight))
        assert dx.shape == empty.shape
        assert dw.shape == problem.weight.shape
        assert not dw.any()


@pytest.mark.parametrize("name", ["weight", "token_weight", "num_items", "logit_scale", "z_loss_weight"])
def test_options_that_require_grad_are_refused(problem: Problem, name: str) -> None:
    shape = {"weight": (CLASSES,), "token_weight": (ROWS,)}.get(name, ())
    value = torch.ones(shape, device=problem.input.device, requires_grad=True)
    with pytest.raises(ValueError, match=f"{name} must not require grad"):
        problem.loss(**{name: value})
    with pytest.raises(ValueError, match=f"{name} must not require grad"):
        problem.logits_loss(**{name: value})
    raw = name + "_tensor" if name in ("logit_scale", "z_loss_weight") else name
    with pytest.raises(ValueError, match=f"{name} must not require grad"):
        torch.ops.syncfree.flce(problem.input, problem.weight, problem.target, **{raw: value})


@LOSSES
def test_transforms_are_refused(problem: Problem, function: Callable[..., Tensor]) -> None:
    def of_input(input: Tensor) -> Tensor:
        if function is Problem.loss:
            return sf.linear_cross_entropy(input, problem.weight, problem.target)
        return sf.cross_entropy(input @ problem.weight.detach().T, problem.target)

    detached = problem.input.detach()
    for transformed in (torch.func.grad(of_input), torch.func.hessian(of_input)):
        with pytest.raises(RuntimeError, match=r"transforms of torch\.func"):
            transformed(detached)
    with pytest.raises(RuntimeError, match=r"transforms of torch\.func"):
        torch.func.jvp(of_input, (detached,), (detached,))
    with pytest.raises(RuntimeError, match=r"transforms of torch\.func"):
        torch.vmap(of_input)(torch.stack([detached, detached]))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        of_input(forward_ad.make_dual(detached, detached))


@LOSSES
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_batched_upstream(problem: Problem, function: Callable[..., Tensor], reduction: str) -> None:
    """is_grads_batched, with which a vectorized jacobian is made; the first backward as any later one."""
    loss = function(problem, reduction=reduction)
    upstream = torch.randn(3, *loss.shape, device=loss.device)
    expected = [problem.reference(one, reduction) for one in upstream]
    for _ in range(2):
        found = grad(loss, problem.leaves, upstream, is_grads_batched=True, retain_graph=True)
        assert_close(found, [torch.stack(each) for each in zip(*expected, strict=True)])
    assert_close(grad(loss, problem.leaves, upstream[0]), expected[0])


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_dtensors_are_refused(device: torch.device, rng: torch.Generator) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    problem = Problem(device, rng)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (1,))
        arguments = {"input": problem.input, "linear_weight": problem.weight, "target": problem.target}
        for name in arguments:
            sharded = distribute_tensor(arguments[name].detach(), mesh, [Replicate()])
            with pytest.raises(TypeError, match=f"{name} must be a plain tensor, got a DTensor"):
                sf.linear_cross_entropy(**arguments | {name: sharded})
        with pytest.raises(TypeError, match="logits must be a plain tensor, got a DTensor"):
            sf.cross_entropy(distribute_tensor(problem.input.detach(), mesh, [Replicate()]), problem.target)
    finally:
        torch.distributed.destroy_process_group()
