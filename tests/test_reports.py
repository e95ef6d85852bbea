"""What was reported against other fused losses, where no other test file asks for it. docs/reports.md lists all."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import syncfree_ext
from helpers import ALL_EXTRAS, compare, loss_and_gradients, small
from syncfree_ext import reference
from tolerances import assert_close_rel, assert_equal

TESTS = Path(__file__).parent
REPORTS = TESTS.parent / "docs" / "reports.md"

# Every option once, and all together.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "lean": {"accum_dtype": torch.bfloat16},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 5.0},
    "token scaling": {"token_scaling": True},
    "scale and z": {"logit_scale": 0.5, "z_loss_weight": 1e-3},
    "shift": {"shift": 1},
    "extras": ALL_EXTRAS,
    "chunks": {"chunk_rows": 128},
}


def tensors_of(name: str, bt: int, v: int, device: torch.device) -> dict[str, Tensor]:
    """The option tensors, which have to be there before a call is timed or captured."""
    ones = {
        "class weights": {"weight": torch.rand(v, device=device)},
        "token weights": {"token_weight": torch.rand(bt, device=device)},
        "num_items": {"num_items": torch.tensor(37, device=device)},
        "schedules": {
            "logit_scale": torch.tensor(0.7, device=device),
            "z_loss_weight": torch.tensor(1e-3, device=device),
        },
    }
    return ones[name]


TENSOR_OPTIONS = ("class weights", "token weights", "num_items", "schedules")


# --------------------------------------------------------------------------------------------------------- the document


def test_the_list_of_reports_names_tests_that_exist() -> None:
    named = set(re.findall(r"`((?:integrations/)?test_\w+)\.py::(test_\w+)`", REPORTS.read_text()))
    assert len(named) > 40
    found: dict[str, set[str]] = {}
    for file, test in sorted(named):
        if file not in found:
            tree = ast.parse((TESTS / f"{file}.py").read_text())
            found[file] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert test in found[file], f"docs/reports.md names {file}.py::{test}, which is not there"


def test_every_report_has_a_link_and_a_test_or_a_reason() -> None:
    rows = [line for line in REPORTS.read_text().splitlines() if line.startswith("| [")]
    assert len(rows) > 50
    for row in rows:
        report, symptom, ours, test = (cell.strip() for cell in row.strip("|").split(" | "))
        assert re.search(r"\(https://\S+\)", report), row
        assert symptom, row
        assert ours, row
        assert re.search(r"`(?:integrations/)?test_\w+\.py::test_\w+`|^—$", test), row
        # What is not tested says why.
        assert test != "—" or ours.startswith("does not apply: "), row


# ----------------------------------------------------------------------------------------------------------- the values


@pytest.mark.parametrize("v", [1, 17, 123, 4099, 32769])
@pytest.mark.parametrize("cap", [None, 1.0, 30.0])
def test_columns_past_the_last_class_have_no_mass(
    v: int, cap: float | None, rng: torch.Generator, device: torch.device
) -> None:
    """Far below 0, a padded column of 0 or of −softcap would be the largest: V logits of −60 are worth log V."""
    bias = torch.full((v,), -60.0, device=device)
    for dtype, h in ((torch.float32, 7), (torch.bfloat16, 16)):
        x, w = torch.zeros(9, h, device=device, dtype=dtype), torch.randn(v, h, generator=rng).to(device, dtype)
        target = torch.randint(0, v, (9,), generator=rng).to(device)
        out, _ = loss_and_gradients(x, w, target, bias, reduction="none", softcap=cap, return_logsumexp=True)
        logit = -60.0 if cap is None else cap * math.tanh(-60.0 / cap)
        assert_close_rel(out.loss, torch.full((9,), math.log(v)), 1e-6, 1e-5, "loss")
        assert_close_rel(out.logsumexp, torch.full((9,), logit + math.log(v)), 1e-6, 1e-5, "logsumexp")
        # Without a bias, and so on the paths that take none: the same logits from the products.
        x, w = torch.full((9, h), -60.0, device=device, dtype=dtype), torch.zeros(v, h, device=device, dtype=dtype)
        w[:, 0] = 1
        loss, _ = loss_and_gradients(x, w, target, None, reduction="none", softcap=cap)
        assert_close_rel(loss, torch.full((9,), math.log(v)), 1e-6, 1e-5, "loss without a bias")


@pytest.mark.parametrize("h", [256, 512, 1024])
def test_the_bias_is_added_once_for_any_hidden_size(h: int, rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device, 30, h, 1024)
    compare(x / h**0.5, w, target, 3 * b)


def test_the_z_part_is_in_the_loss_whether_it_is_returned_or_not(rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device)
    without, _ = loss_and_gradients(x, w, target, b)
    alone, grads = loss_and_gradients(x, w, target, b, z_loss_weight=0.1)
    both, both_grads = loss_and_gradients(x, w, target, b, z_loss_weight=0.1, return_z_loss=True)
    assert_equal(alone, both.loss)
    assert float(both.z_loss) > 0
    assert_close_rel(both.loss, without + both.z_loss, 1e-6)
    for a, g in zip(grads, both_grads, strict=True):
        assert_equal(a, g)


@pytest.mark.parametrize("ignored", [0, 9, 29])
def test_the_mean_is_over_the_scored_rows(ignored: int, rng: torch.Generator, device: torch.device) -> None:
    x, w, target, b = small(rng, device, 30)
    target[:ignored] = -100
    loss, _ = loss_and_gradients(x, w, target, b)
    assert_close_rel(loss, F.cross_entropy(F.linear(x.double(), w.double(), b.double()), target), 1e-6)


def test_a_temperature_for_each_token(rng: torch.Generator, device: torch.device) -> None:
    """There is one logit_scale for all rows; another for each is a factor of the hidden states."""
    x, w, target, _ = small(rng, device)
    temperature = 0.5 + torch.rand(len(x), 1, generator=rng).to(device)
    leaf = x.clone().requires_grad_()
    loss = syncfree_ext.linear_cross_entropy(leaf / temperature, w, target)
    expected_leaf = x.double().requires_grad_()
    expected = F.cross_entropy(expected_leaf @ w.double().T / temperature.double(), target)
    assert_close_rel(loss, expected, 1e-6)
    (grad,) = torch.autograd.grad(loss, leaf)
    (expected_grad,) = torch.autograd.grad(expected, expected_leaf)
    assert_close_rel(grad, expected_grad, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_logits_of_many_classes_give_gradients_rounded_once(
    dtype: torch.dtype, rng: torch.Generator, device: torch.device
) -> None:
    z = torch.randn(6, 64000, generator=rng).to(device, dtype).requires_grad_()
    target = torch.randint(0, 64000, (6,), generator=rng).to(device)
    upstream = 1024.0
    syncfree_ext.cross_entropy(z, target, reduction="sum").backward(torch.tensor(upstream, device=device))
    expected = reference.cross_entropy_gradients(z.detach(), target, reduction="sum", grad_output=upstream).dx
    assert z.grad is not None
    spacing = torch.finfo(dtype).eps / 2
    error = (z.grad.double() - expected).abs()
    # Subnormal numbers of float16 are spaced by 2^-24.
    assert bool((error <= expected.abs() * (spacing + 1e-5) + 2.0**-25).all())


def test_class_weights_in_half_precision_are_summed_in_full(rng: torch.Generator, device: torch.device) -> None:
    """128256 ones are infinite when they are added up in float16, and 128000 in bfloat16."""
    v = 128256
    x, w, target, _ = small(rng, device, 5, 3, v)
    expected, _ = loss_and_gradients(x, w, target, label_smoothing=0.1)
    for dtype in (torch.float16, torch.bfloat16):
        loss, _ = loss_and_gradients(
            x, w, target, label_smoothing=0.1, weight=torch.ones(v, device=device, dtype=dtype)
        )
        assert_close_rel(loss, expected, 1e-6)


def test_a_sum_of_many_rows_in_float16_does_not_overflow(rng: torch.Generator, device: torch.device) -> None:
    """num_items divides before anything is rounded: a sum that is divided in the caller's code is infinite by then."""
    x = 20 * torch.ones(4096, 8, device=device, dtype=torch.float16)
    w = torch.zeros(3, 8, device=device, dtype=torch.float16)
    target = torch.zeros(4096, dtype=torch.int64, device=device)
    _, grads = loss_and_gradients(x, w, target, num_items=4096)
    ref = reference.linear_cross_entropy_gradients(x, w, target, num_items=4096)
    assert ref.dw is not None
    assert_close_rel(grads[1], ref.dw, 1e-3)
    summed, summed_grads = loss_and_gradients(x, w, target, upstream=1 / 4096, reduction="sum")
    assert_close_rel(summed_grads[1], ref.dw, 1e-3)
    assert summed.isfinite()


# ----------------------------------------------------------------------------------------------- training around a loss


def test_backward_needs_no_weight_of_a_mean(rng: torch.Generator, device: torch.device) -> None:
    """A sharded trainer may free the gathered weight between forward and backward."""
    x, w, target, b = small(rng, device)
    leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    loss = syncfree_ext.linear_cross_entropy(leaf, weight, target, linear_bias=b)
    weight.data = weight.new_empty(0)
    grads = torch.autograd.grad(loss, (leaf, weight))
    ref = reference.linear_cross_entropy_gradients(x, w, target, linear_bias=b)
    assert_close_rel(grads[0], ref.dx, 1e-5)
    assert ref.dw is not None
    assert_close_rel(grads[1], ref.dw, 1e-5)


def test_a_batch_without_targets_trains_with_the_others(rng: torch.Generator, device: torch.device) -> None:
    """A loss without a grad_fn would leave the other ranks waiting, and one of NaN would end the run."""
    x, w, target, b = small(rng, device)
    weight = w.clone().requires_grad_()
    for reduction, more in (("mean", {}), ("mean", {"num_items": 0}), ("sum", {}), ("none", {})):
        weight.grad = None
        for targets in (target, torch.full_like(target, -100), target):
            loss = syncfree_ext.linear_cross_entropy(x, weight, targets, linear_bias=b, reduction=reduction, **more)
            assert loss.requires_grad
            loss.sum().backward()
        assert weight.grad is not None
        ref = reference.linear_cross_entropy_gradients(x, w, target, linear_bias=b, reduction=reduction, **more)
        assert ref.dw is not None
        assert_close_rel(weight.grad, 2 * ref.dw, 1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_target_out_of_range_is_found_under_compile(backend: str, rng: torch.Generator, device: torch.device) -> None:
    if backend == "inductor" and device.type == "cpu":
        backend = "eager"  # inductor compiles no kernel for this graph; its C++ toolchain may be missing
    torch._dynamo.reset()
    x, w, target, _ = small(rng, device)

    @torch.compile(backend=backend, fullgraph=True)
    def step(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = syncfree_ext.linear_cross_entropy(x, w, target)
        return loss

    assert step(x, w, target).isfinite()
    for bad in (len(w), -1):
        target[4] = bad
        if device.type == "cpu":
            with pytest.raises(IndexError, match=f"got {bad}"):
                step(x, w, target)
        else:
            assert step(x, w, target).isnan()
    torch._dynamo.reset()


# -------------------------------------------------------------------------------------------------------- on the device


def _problem(device: torch.device, dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    x = torch.randn(300, 64, device=device, dtype=dtype, requires_grad=True)
    w = (torch.randn(520, 64, device=device) / 8).to(dtype).requires_grad_()
    target = torch.randint(0, 520, (300,), device=device)
    target[::4] = -100
    return x, w, target, torch.randn(520, device=device, requires_grad=True) if bias else None


def _step(
    x: Tensor, w: Tensor, target: Tensor, b: Tensor | None, upstream: Tensor, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    out = syncfree_ext.linear_cross_entropy(x, w, target, linear_bias=b, **options)
    loss = out if isinstance(out, Tensor) else out.loss
    leaves: list[Tensor] = [x, w] if b is None else [x, w, b]
    return loss.detach(), *torch.autograd.grad(loss, leaves, upstream.expand(loss.shape))


def _options(name: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    if name in TENSOR_OPTIONS:
        return tensors_of(name, 300, 520, device)
    options = dict(OPTIONS[name])
    if "accum_dtype" in options:
        options["accum_dtype"] = dtype
    return options


def _steps(name: str, dtype: torch.dtype, bias: bool, device: torch.device) -> Callable[[], None]:
    """Both losses, forward and backward, with two upstream gradients; all tensors are there before they run."""
    x, w, target, b = _problem(device, dtype, bias)
    options = _options(name, device, dtype)
    rest = {key: value for key, value in options.items() if key not in ("chunk_rows", "accum_dtype")}
    upstreams = [torch.tensor(1.0, device=device), torch.tensor(0.5, device=device)]

    def steps() -> None:
        for upstream in upstreams:
            _step(x, w, target, b, upstream, options)
        logits = F.linear(x, w, None if b is None else b.to(dtype))
        out = syncfree_ext.cross_entropy(logits, target, **rest)
        (out if isinstance(out, Tensor) else out.loss).sum().backward()

    return steps


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_option_waits_for_the_device(dtype: torch.dtype, device: torch.device) -> None:
    mode = torch.cuda.get_sync_debug_mode()
    for name, bias in itertools.product((*OPTIONS, *TENSOR_OPTIONS), (False, True)):
        steps = _steps(name, dtype, bias, device)
        steps()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps()
        except RuntimeError as error:
            raise AssertionError(f"{name}, {'with' if bias else 'no'} bias: {error}") from error
        finally:
            torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_graph_follows_targets_counts_and_upstream(dtype: torch.dtype, device: torch.device) -> None:
    """A captured step gives what an eager one gives, for targets, counts and scalars that were not there at capture."""
    for name, bias in itertools.product((*OPTIONS, *TENSOR_OPTIONS), (False, True)):
        x, w, target, b = _problem(device, dtype, bias)
        options = _options(name, device, dtype)
        upstream = torch.tensor(1.0, device=device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                _step(x, w, target, b, upstream, options)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = _step(x, w, target, b, upstream, options)
        for ignored, factor in ((0.0, 1.0), (0.6, 0.5), (1.1, 2.0), (0.3, 1.0)):
            target.random_(0, 520)
            target[torch.rand(300, device=device) < ignored] = -100
            upstream.fill_(factor)
            for value in options.values():
                if isinstance(value, Tensor) and value.is_floating_point():
                    value.mul_(0.75)
                elif isinstance(value, Tensor):
                    value.add_(11)
            graph.replay()
            torch.cuda.synchronize()
            for got, expected in zip(captured, _step(x, w, target, b, upstream, options), strict=True):
                assert_equal(got, expected, f"{name}, {'with' if bias else 'no'} bias, {ignored} ignored")


@pytest.mark.cuda
@pytest.mark.parametrize("frozen", ["", "x", "w"])
def test_peak_memory_is_the_gradients_and_a_workspace(frozen: str, device: torch.device) -> None:
    """No V x H temporary beside the accumulator, no logits beyond the workspace, nothing for what is frozen."""
    bt, h, v, workspace = 4096, 2048, 32000, 32 << 20
    x = torch.randn(bt, h, device=device, dtype=torch.bfloat16, requires_grad=frozen != "x")
    w = torch.randn(v, h, device=device, dtype=torch.bfloat16, requires_grad=frozen != "w")
    target = torch.randint(0, v, (bt,), device=device)

    def step() -> None:
        syncfree_ext.linear_cross_entropy(x, w, target, workspace_bytes=workspace).backward()
        x.grad = w.grad = None

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    # dW in bf16 and a float32 accumulator; dX, the gathered rows and a copy of them; logits of at least 1024 rows.
    allowed = (0 if frozen == "w" else v * h * 6) + 3 * bt * h * 2 + max(workspace, 1024 * v * 4) + (24 << 20)
    assert peak <= allowed, f"{peak >> 20} MiB, allowed {allowed >> 20} MiB"
