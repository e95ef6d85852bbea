"""The way to the kernels: straight to autograd where the dispatcher would only come back, and through it where
something watches or changes operations.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import syncfree_ext as sf
from autograd_problem import CLASSES, HIDDEN, LOSSES, ROWS, Problem, assert_close, grad
from syncfree_ext import _dispatch, _flops, ops


@pytest.fixture
def problem(device: torch.device, rng: torch.Generator) -> Problem:
    return Problem(device, rng)


class Way:
    """Counts the calls that came to autograd through the dispatcher, and those that went straight on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dispatched = self.direct = 0
        below = ops.below_autograd

        def counting(op: Any, keyset: Any, *args: Any, **options: Any) -> Any:
            if op.name() in ("syncfree::flce_forward", "syncfree::cross_entropy_forward"):
                self.dispatched += keyset is not None
                self.direct += keyset is None
            return below(op, keyset, *args, **options)

        monkeypatch.setattr(ops, "below_autograd", counting)


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Way:
    return Way(monkeypatch)


class _Modes:
    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))


COMPOSITES = (3, 6)


def _losses(problem: Problem) -> Iterator[Callable[[], Tensor]]:
    logits = (problem.input @ problem.weight.T).detach().requires_grad_()
    yield lambda: sf.linear_cross_entropy(problem.input, problem.weight, problem.target, linear_bias=problem.bias)
    yield lambda: sf.linear_cross_entropy(problem.input, problem.weight, problem.target, reduction="none").sum()
    yield lambda: sf.linear_cross_entropy(problem.input, problem.weight, problem.target, return_logsumexp=True).loss
    yield lambda: torch.ops.syncfree.flce(problem.input, problem.weight, problem.target)
    yield lambda: sf.cross_entropy(logits, problem.target)
    yield lambda: sf.cross_entropy(logits, problem.target, return_predicted_tokens=True).loss
    yield lambda: torch.ops.syncfree.cross_entropy(logits, problem.target)


@pytest.mark.parametrize("which", range(7))
@pytest.mark.parametrize("grads", [True, False])
def test_straight_in_plain_eager(problem: Problem, way: Way, which: int, grads: bool) -> None:
    """With nothing in between, the only kernel that the dispatcher is asked for is the compiled one."""
    loss = list(_losses(problem))[which]
    with torch.set_grad_enabled(grads):
        value = loss()
    assert value.requires_grad == grads
    assert (way.direct, way.dispatched) == (1, 0)


@pytest.mark.parametrize("autocast", [True, False])
def test_straight_under_autocast(problem: Problem, way: Way, autocast: bool) -> None:
    with torch.autocast(problem.input.device.type, torch.bfloat16, enabled=autocast):
        problem.loss().backward()
    assert (way.direct, way.dispatched) == (1, 0)


@pytest.mark.parametrize("mode", [_Modes.Dispatch, _Modes.Functions, torch.inference_mode])
@pytest.mark.parametrize("which", range(7))
def test_modes_see_the_op(problem: Problem, way: Way, mode: Callable[[], Any], which: int) -> None:
    loss = list(_losses(problem))[which]
    expected = loss()
    assert (way.direct, way.dispatched) == (1, 0)
    with mode():
        value = loss()
    # A mode of functions sees the composite, and is off while it looks.
    assert way.direct == (2 if which in COMPOSITES and mode is _Modes.Functions else 1)
    assert torch.equal(value, expected)


@pytest.mark.parametrize("position", range(4))
def test_subclasses_see_the_op(problem: Problem, way: Way, position: int) -> None:
    """Whichever tensor is of a subclass, an option's too."""
    seen = []

    class Watching(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    tensors = [problem.input, problem.weight, problem.target, torch.ones(len(problem.weight)).to(problem.input)]
    expected = ops.flce_outputs(*tensors[:3], weight=tensors[3], loss_only=True)
    tensors[position] = tensors[position].detach().as_subclass(Watching)
    (value,) = ops.flce_outputs(*tensors[:3], weight=tensors[3], loss_only=True)
    assert "syncfree.flce_forward.default" in seen
    assert way.direct == 1
    assert_close([value.as_subclass(Tensor)], expected, 1e-6)


@pytest.mark.parametrize("pre_dispatch", [True, False])
def test_traces_hold_the_op(problem: Problem, way: Way, pre_dispatch: bool) -> None:
    def loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return ops.flce_outputs(x, w, t, loss_only=True)[0]

    traced = make_fx(loss, pre_dispatch=pre_dispatch)(problem.input, problem.weight, problem.target)
    assert way.direct == 0
    assert [str(node.target) for node in traced.graph.nodes if "syncfree" in str(node.target)] == [
        "syncfree.flce_forward.default"
    ]


def test_jit_trace_holds_the_op(problem: Problem, way: Way) -> None:
    x, w = problem.input.detach(), problem.weight.detach()
    traced = torch.jit.trace(lambda x: ops.flce_outputs(x, w, problem.target, loss_only=True)[0], x, check_trace=False)
    assert way.direct == 0
    assert "syncfree::flce_forward" in str(traced.graph)


@LOSSES
def test_below_autograd_nothing_is_differentiated(
    problem: Problem, way: Way, function: Callable[[Problem], Tensor]
) -> None:
    """As in the body of somebody's custom op: the graph is his business."""
    with torch._C._AutoDispatchBelowAutograd():
        value = function(problem)
    assert not value.requires_grad
    assert way.direct == 0


@LOSSES
@pytest.mark.parametrize("upstream", [1.0, 0.5])
@pytest.mark.parametrize("mode", [_Modes.Dispatch, nullcontext])
def test_both_ways_give_the_same(
    problem: Problem,
    function: Callable[[Problem], Tensor],
    upstream: float,
    mode: Callable[[], AbstractContextManager[None]],
) -> None:
    direct = function(problem)
    expected = grad(direct * upstream, problem.leaves)
    with mode():
        value = function(problem)
    assert torch.equal(value, direct)
    for got, want in zip(grad(value * upstream, problem.leaves), expected, strict=True):
        assert (got is None) == (want is None)
        assert got is None or torch.equal(got, want)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("ignore_index", 3),
        ("label_smoothing", 0.25),
        ("logit_scale", 0.5),
        ("z_loss_weight", 0.125),
        ("shift", 1),
        ("softcap", 2.0),
        ("token_scaling", True),
        ("reduction", "sum"),
        ("chunk_rows", 3),
        ("workspace_bytes", 2048),
    ],
)
def test_options_arrive(problem: Problem, way: Way, option: str, value: Any) -> None:
    """None is dropped with those that are as the schema has them, in forward or for a second backward."""

    def both(loss: Tensor) -> list[Tensor | None]:
        return [loss, *grad(loss, problem.leaves[:2], retain_graph=True), *grad(loss, problem.leaves[:2])]

    if option == "ignore_index":
        problem.target.clamp_(min=0)[:2] = 3

    def loss() -> Tensor:
        return sf.linear_cross_entropy(problem.input, problem.weight, problem.target, **{option: value})

    direct = both(loss())
    assert (way.direct, way.dispatched) == (1, 0)
    with _Modes.Dispatch():
        through = loss()
    assert way.dispatched == 1
    for got, want in zip(direct, both(through), strict=True):
        assert torch.equal(got, want)
    if option not in ("chunk_rows", "workspace_bytes"):
        plain = sf.linear_cross_entropy(problem.input, problem.weight, problem.target)
        assert not torch.equal(plain, direct[0])


def test_defaults_are_those_of_all_schemas() -> None:
    """What forward leaves out, a second backward gets by default."""
    for op in ("flce", "flce_backward", "cross_entropy", "cross_entropy_forward", "cross_entropy_backward"):
        for argument in getattr(torch.ops.syncfree, op).default._schema.arguments:
            if argument.has_default_value() and argument.name in ops.DEFAULTS:
                assert argument.default_value == ops.DEFAULTS[argument.name]


@pytest.mark.parametrize(
    "options",
    [{"logit_scale": False}, {"ignore_index": False}, {"label_smoothing": False}, {"need_logsumexp": 1}],
    ids=str,
)
def test_false_is_a_number_where_one_is_expected(problem: Problem, options: dict[str, Any]) -> None:
    problem.target.clamp_(min=0)
    direct = ops.flce_outputs(problem.input, problem.weight, problem.target, **options)
    with _Modes.Dispatch():
        through = ops.flce_outputs(problem.input, problem.weight, problem.target, **options)
    for got, want in zip(direct, through, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("options", [{"reduction": None}, {"logit_scale": None}, {"unknown": None}, {"unknown": False}])
def test_wrong_options_are_refused(problem: Problem, options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=next(iter(options))):
        ops.flce_outputs(problem.input, problem.weight, problem.target, **options)


@pytest.mark.parametrize("which", range(7))
def test_inference_tensors_outside_of_inference_mode(device: torch.device, rng: torch.Generator, which: int) -> None:
    """They have no autograd, so nothing is saved of them."""
    with torch.inference_mode():
        problem = Problem(device, rng)
        loss = list(_losses(problem))[which]
    assert not loss().requires_grad


@pytest.mark.parametrize("whole", [True, False])
def test_autograd_that_is_excluded_otherwise(problem: Problem, whole: bool) -> None:
    part = "Functionality" if whole else problem.input.device.type.upper()
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autograd{part}"))
    with torch._C._ExcludeDispatchKeyGuard(keys):
        assert not problem.loss().requires_grad


def test_a_tensor_that_outlived_a_transform(problem: Problem) -> None:
    """It is wrapped still, and what is inside needs a gradient."""
    kept = []

    def keep(p: Tensor) -> Tensor:
        kept.append(problem.input * 1)
        return (p * kept[-1]).sum()

    torch.func.grad(keep)(torch.ones_like(problem.input))
    for loss in (
        sf.linear_cross_entropy(kept[0], problem.weight.detach(), problem.target),
        sf.cross_entropy(kept[0], problem.target.clamp(max=problem.input.shape[1] - 1)),
    ):
        assert loss.requires_grad


@pytest.mark.parametrize("pre_dispatch", [True, False])
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_a_traced_backward_runs_again(problem: Problem, pre_dispatch: bool, tracing_mode: str) -> None:
    """A gradient that was computed before the trace must not be scaled in place by its graph."""
    loss = problem.loss()
    expected = grad(problem.loss() * 0.5, problem.leaves)

    def backward(upstream: Tensor) -> list[Tensor]:
        return grad(loss, problem.leaves, upstream, retain_graph=True)

    upstream = torch.ones_like(loss)
    trace = make_fx(backward, pre_dispatch=pre_dispatch, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)
    traced = trace(upstream)
    for _ in range(3):
        assert_close(traced(upstream * 0.5), expected, 1e-6)


def test_a_refused_argument_is_a_value_error() -> None:
    """Also where torch makes a RuntimeError of what a kernel throws; a failure stays what it is."""
    with pytest.raises(ValueError, match=r"^syncfree::flce_forward: input must be 2-D"):
        _dispatch.raise_refused(RuntimeError("syncfree::flce_forward: input must be 2-D, got shape (3,)"))
    for text in ("syncfree: gather kernel: invalid argument", "syncfree::flce_forward() is missing a value", "CUDA"):
        _dispatch.raise_refused(RuntimeError(text))


def test_flops_can_be_registered_again() -> None:
    importlib.reload(_flops)


@pytest.mark.parametrize("frozen", [(), ("input",), ("weight", "bias"), ("input", "weight", "bias")], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_flops_are_those_of_the_products(
    reduction: str, frozen: tuple[str, ...], device: torch.device, rng: torch.Generator
) -> None:
    problem = Problem(device, rng, frozen=frozen)
    product = 2 * ROWS * HIDDEN * CLASSES
    with FlopCounterMode(display=False) as counter:
        loss = problem.loss(reduction=reduction)
        forward = counter.get_total_flops()
        if loss.requires_grad:
            loss.sum().backward()
    gradients = product * sum(leaf.requires_grad for leaf in problem.leaves[:2])
    if reduction == "mean":  # which computes the gradients in forward
        assert (forward, counter.get_total_flops()) == (product + gradients, product + gradients)
    else:  # and this all of it again in backward
        again = product + gradients if loss.requires_grad else 0
        assert (forward, counter.get_total_flops()) == (product, product + again)
