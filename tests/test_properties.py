"""Properties of both losses over their whole option space: equal to float64, and what follows from the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import syncfree_ext
from cases import DTYPES, Call
from exactness import check_gradients, check_values, exact
from helpers import ALL_EXTRAS
from strategies import linear_call, linear_cases, logits_call, logits_cases, plain_cases, property_test
from tolerances import assert_close_rel, assert_equal

MODES = ("backward", "grad", "second backward", "reentrant checkpoint", "checkpoint", "saved tensor hooks")
HALF_MAX = 3e4


def dtype_of(case: dict[str, Any], device: torch.device) -> torch.dtype:
    dtype = DTYPES[case["dtype"]]
    return torch.float32 if device.type == "cuda" and dtype == torch.float64 else dtype


def autocast_of(case: dict[str, Any], dtype: torch.dtype) -> torch.dtype | None:
    return None if case.get("autocast", "no") == "no" or dtype == torch.float64 else DTYPES[case["autocast"]]


def on(device: torch.device, call: Call) -> Call:
    """The call on the device, in the memory layout that it has."""

    def moved(t: Any) -> Any:
        if not isinstance(t, Tensor) or device.type == "cpu":
            return t
        if t.numel() == 0:
            return t.to(device)
        # Its memory as it is, what lies between the elements included.
        size = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
        flat = torch.as_strided(t.detach(), (size,), (1,), t.storage_offset()).to(device)
        # An offset of one element stays one: alignment is part of the layout.
        held = torch.empty(size + 1, dtype=t.dtype, device=device)[t.storage_offset() % 2 :][:size].copy_(flat)
        return torch.as_strided(held, t.shape, t.stride(), held.storage_offset())

    return Call(
        moved(call.input),
        moved(call.linear_weight),
        moved(call.target),
        moved(call.linear_bias),
        {name: moved(value) for name, value in call.options.items()},
        moved(call.upstream),
    )


def linear(call: Call, leaves: tuple[Tensor | None, ...], **more: Any) -> Any:
    return syncfree_ext.linear_cross_entropy(
        leaves[0], leaves[1], call.target, linear_bias=leaves[2], **call.options, **more
    )


def logits(call: Call, leaves: tuple[Tensor | None, ...], **more: Any) -> Any:
    return syncfree_ext.cross_entropy(leaves[0], call.target, **call.options, **more)


def run(call: Call, trainable: str, function: Any = linear, **more: Any) -> tuple[Any, tuple[Tensor | None, ...]]:
    leaves = call.leaves(trainable)
    out = function(call, leaves, **more)
    loss = out if isinstance(out, Tensor) else out.loss
    if loss.requires_grad:
        loss.backward(call.upstream)
    return out, tuple(None if leaf is None else leaf.grad for leaf in leaves)


def linear_options(case: dict[str, Any]) -> dict[str, Any]:
    """What changes no value: chunks, and the extras that were asked for."""
    chunks = {"chunk_rows": case["chunk_rows"], "workspace_bytes": case["workspace_bytes"]}
    accum = {"accum_dtype": DTYPES[case["accum_dtype"]]} if case["accum_dtype"] != "no" else {}
    return chunks | accum | {f"return_{name}": True for name in case["extras"]}


def is_repeated(case: dict[str, Any]) -> bool:
    """Whether rows of the input or of the weight are equal."""
    return case["x_layout"] == "expanded" or case["data"] in ("equal", "zero", "far")


def assume_representable(call: Call, e: Any) -> None:
    """Gradients that float16 holds, and no 0/0 that the caller asked for."""
    hypothesis.assume(bool(e.gradients.output.loss.isfinite().all()))
    for leaf, grad in ((call.input, e.gradients.dx), (call.linear_weight, e.gradients.dw)):
        if torch.float16 in (leaf.dtype, call.linear_weight.dtype) and grad is not None and grad.numel():
            hypothesis.assume(float(grad.abs().max()) < HALF_MAX)


Place = Callable[[torch.device, Call], Call]


def check_linear(case: dict[str, Any], device: torch.device, place: Place = on) -> None:
    """place: brings the call to the device."""
    dtype = dtype_of(case, device)
    call = linear_call(case, dtype)
    autocast = autocast_of(case, dtype)
    compute = autocast or dtype
    if autocast and case["seed"] % 2:  # layers in front of the head may have run in lower precision already
        call.input = call.input.to(autocast)
    e = exact(call, compute)
    assume_representable(call, e)
    if compute == torch.float16:
        hypothesis.assume(all(t.to(compute).isfinite().all() for t in (call.input, call.linear_weight)))
        hypothesis.assume(float(e.gradients.dx.abs().amax() if e.gradients.dx.numel() else 0) < HALF_MAX)
        hypothesis.assume(float(e.gradients.dw.abs().amax()) < HALF_MAX)
    trainable = case["trainable"] if call.linear_bias is not None else case["trainable"].replace("b", "")
    moved = place(device, call)
    with torch.autocast(device.type, dtype=autocast) if autocast else nullcontext():
        out, grads = run(moved, trainable, **linear_options(case))
    loss = out if isinstance(out, Tensor) else out.loss
    assert loss.requires_grad == bool(trainable)
    assert isinstance(out, Tensor) == (not case["extras"])
    check_values(moved, e, out, compute)
    check_gradients(moved, e, grads, trainable, compute, is_repeated(case))


@property_test(linear_cases(), examples=400)
def test_linear_cross_entropy_is_exact(case: dict[str, Any], device: torch.device) -> None:
    check_linear(case, device)


@property_test(plain_cases(), examples=150)
def test_plain_linear_cross_entropy_is_exact(case: dict[str, Any], device: torch.device) -> None:
    """The calls that have kernels of their own on some GPUs."""
    check_linear(case, device)


def check_logits(case: dict[str, Any], device: torch.device, place: Place = on) -> None:
    call = logits_call(case, dtype_of(case, device))
    e = exact(call, logits=True)
    assume_representable(call, e)
    moved = place(device, call)
    before = moved.input.clone()
    out, grads = run(moved, case["trainable"], logits, **{f"return_{name}": True for name in case["extras"]})
    check_values(moved, e, out)
    check_gradients(moved, e, (grads[0], None, None), case["trainable"])
    assert_equal(moved.input, before, "logits of the caller")


@property_test(logits_cases(), examples=200)
def test_cross_entropy_is_exact(case: dict[str, Any], device: torch.device) -> None:
    check_logits(case, device)


# ------------------------------------------------------------------------------- what follows from the definition alone


@property_test(linear_cases(), examples=100)
def test_every_way_to_a_gradient_gives_the_same(case: dict[str, Any], device: torch.device) -> None:
    """Backward of a retained graph, checkpoints, hooks on saved tensors: the same loss and gradients, to the bit."""
    dtype = dtype_of(case, device)
    call = on(device, linear_call(case, dtype))
    trainable = "xw"
    more = linear_options(case) | {"return_logsumexp": False}
    expected, expected_grads = run(call, trainable, **more)
    more = {name: value for name, value in more.items() if not name.startswith("return_")}
    expected = expected if isinstance(expected, Tensor) else expected.loss
    mode = MODES[case["seed"] % len(MODES)]
    leaves = call.leaves(trainable)

    def of(x: Tensor, w: Tensor) -> Tensor:
        return linear(call, (x, w, leaves[2]), **more)

    if mode in ("reentrant checkpoint", "checkpoint"):
        loss = checkpoint(of, leaves[0], leaves[1], use_reentrant=mode != "checkpoint")
        loss.backward(call.upstream)
    elif mode == "saved tensor hooks":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = of(leaves[0], leaves[1])
        loss.backward(call.upstream)
    elif mode == "second backward":
        loss = of(leaves[0], leaves[1])
        first = torch.autograd.grad(loss, leaves[:2], 3 * call.upstream, retain_graph=True)
        kept = [g.clone() for g in first]
        loss.backward(call.upstream)
        for given, was in zip(first, kept, strict=True):
            assert_equal(given, was, "a gradient that was given away")
    else:
        loss = of(leaves[0], leaves[1])
        grads = torch.autograd.grad(loss, leaves[:2], call.upstream)
        leaves[0].grad, leaves[1].grad = grads
    assert_equal(loss, expected, "loss")
    # Copies lie in memory in another way, which on CUDA may choose other kernels.
    moved = (
        mode == "saved tensor hooks"
        and device.type == "cuda"
        and {case["x_layout"], case["w_layout"]} != {"contiguous"}
    )
    if moved or (mode == "second backward" and call.options["reduction"] != "none"):
        # Or recomputed, with the upstream gradient applied in another place: not the same bits.
        on_cpu = linear_call(case, dtype)
        e = exact(on_cpu)
        assume_representable(on_cpu, e)
        check_gradients(call, e, (leaves[0].grad, leaves[1].grad, None), trainable, repeated=is_repeated(case))
        return
    for name, leaf, grad in zip("xw", leaves[:2], expected_grads[:2], strict=True):
        assert_equal(leaf.grad, grad, f"d{name}")


@property_test(linear_cases(), examples=100)
def test_without_gradients_the_loss_is_the_same(case: dict[str, Any], device: torch.device) -> None:
    call = on(device, linear_call(case, dtype_of(case, device)))
    more = linear_options(case)
    expected, _ = run(call, "", **more)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = linear(call, call.leaves("xw"), **more)
        pairs = [(out, expected)] if isinstance(out, Tensor) else zip(out, expected, strict=True)
        for a, b in pairs:
            assert (a is None) == (b is None)
            if a is not None:
                assert not a.requires_grad
                assert_equal(a, b)


@property_test(linear_cases(), examples=100)
def test_layout_chunks_and_ignored_rows_change_nothing(case: dict[str, Any], device: torch.device) -> None:
    """Contiguous copies give the same bits; NaN in the hidden states of ignored rows is never seen."""
    call = on(device, linear_call(case, dtype_of(case, device)))
    more = {"chunk_rows": case["chunk_rows"], "workspace_bytes": case["workspace_bytes"]}
    out, grads = run(call, "xwb", **more, **ALL_EXTRAS)
    ignored = (out.predicted_tokens == -1).unsqueeze(-1)
    plain = Call(
        torch.where(ignored, math.nan, call.input),
        call.linear_weight.contiguous(),
        call.target.contiguous(),
        call.linear_bias,
        {name: t.contiguous() if isinstance(t, Tensor) else t for name, t in call.options.items()},
        call.upstream.contiguous(),
    )
    other, other_grads = run(plain, "xwb", **more, **ALL_EXTRAS)
    # Another pitch or offset may take another GEMM, whose sums differ by an ulp.
    same_bits = device.type == "cpu" and case["w_layout"] == case["x_layout"] == "contiguous"
    hypothesis.assume(bool(out.loss.isfinite().all()))
    for a, b in zip((other.loss, other.logsumexp, *other_grads), (out.loss, out.logsumexp, *grads), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert bool(a.isfinite().all())
            if same_bits:
                assert_equal(a, b)
    rows = ignored.expand(call.input.shape)
    for dx in (grads[0], other_grads[0]):
        assert dx is not None
        assert not dx[rows].any(), "gradients of ignored rows"


@property_test(linear_cases(), examples=100)
def test_reductions_agree_with_the_loss_per_row(case: dict[str, Any], device: torch.device) -> None:
    """The sum is the sum of the rows; a shift is a target that was moved; token weights are upstream gradients."""
    case = case | {"reduction": "none", "num_items": "no", "autocast": "no"}
    call = linear_call(case, dtype_of(case, device))
    e = exact(call)
    assume_representable(call, e)
    call = on(device, call)
    rows, _ = run(call, "")
    assert rows.shape == call.target.shape
    summed, _ = run(Call(**{**vars(call), "options": call.options | {"reduction": "sum"}}), "")
    floor = 8 * (e.loss_floor + 1e-6 * e.loss_size) * math.sqrt(max(1, rows.numel()))
    assert_close_rel(summed, rows.double().sum(), 1e-6, floor, "sum")

    ignore = -100 if call.options.get("ignore_index") is None else call.options["ignore_index"]
    shift = call.options["shift"]
    if shift and -(2**31) <= ignore < 2**31:
        moved = torch.full(call.target.shape, ignore, dtype=call.target.dtype, device=device)
        weight = None if call.options["token_weight"] is None else torch.zeros_like(call.options["token_weight"])
        if shift < call.target.shape[-1]:
            moved[..., :-shift] = call.target[..., shift:]
            if weight is not None:
                weight[..., :-shift] = call.options["token_weight"][..., shift:]
        options = call.options | {"shift": 0, "token_weight": weight}
        again, _ = run(Call(**{**vars(call), "target": moved, "options": options}), "")
        assert_equal(again, rows, "a shift")


@property_test(linear_cases(), examples=60)
def test_a_target_out_of_range_is_never_silent(case: dict[str, Any], device: torch.device) -> None:
    call = linear_call(case | {"shift": 0, "autocast": "no"}, dtype_of(case, device))
    bad = (call.linear_weight.shape[0], -1, -(2**31) + 1, 2**31 - 1)[case["seed"] % 4]
    ignore = -100 if call.options.get("ignore_index") is None else call.options["ignore_index"]
    hypothesis.assume(call.target.numel() > 0 and bad != ignore)
    call.target = call.target.clone(memory_format=torch.contiguous_format)
    at = case["seed"] // 4 % call.target.numel()
    call.target.view(-1)[at] = bad
    moved = on(device, call)
    if device.type == "cpu":
        with pytest.raises(IndexError, match=rf"target.*got {bad}\b"):
            run(moved, "xw")
        return
    loss, grads = run(moved, "xw")
    assert bool(loss.reshape(-1)[at if call.options["reduction"] == "none" else 0].isnan())
    if not call.options["token_scaling"] or call.options["reduction"] != "none":
        assert grads[0] is not None
        assert bool(grads[0].reshape(call.target.numel(), -1)[at].isnan().all())


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda of, x: torch.func.grad(of)(x),
    "vjp": lambda of, x: torch.func.vjp(of, x),
    "jvp": lambda of, x: torch.func.jvp(of, (x,), (x,)),
    "vmap": lambda of, x: torch.vmap(of)(torch.stack([x, x])),
    "hessian": lambda of, x: torch.func.hessian(of)(x),
    "jacrev": lambda of, x: torch.func.jacrev(of)(x),
}


@property_test(linear_cases(), examples=30)
def test_transforms_of_torch_func_are_refused(case: dict[str, Any], device: torch.device) -> None:
    """torch.func needs a rule for each transform; there is none here, which is an error and never another value."""
    call = on(device, linear_call(case | {"reduction": "mean"}, dtype_of(case, device)))

    def of(input: Tensor) -> Tensor:
        loss: Tensor = linear(call, (input, call.linear_weight, call.linear_bias))
        return loss

    transform = TRANSFORMS[sorted(TRANSFORMS)[case["seed"] % len(TRANSFORMS)]]
    with pytest.raises(RuntimeError, match=r"transforms of torch\.func"):
        transform(of, call.input.contiguous())
