"""Loss, extras and gradients of linear_cross_entropy against the float64 reference on the same rounded inputs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import syncfree_ext
from cases import DIMENSIONS, DTYPES, EVEN_DIMENSIONS, PLAIN_DIMENSIONS, Call, build, case_id, covering_array, data
from syncfree_ext import reference
from syncfree_ext.reference import Gradients
from tolerances import (
    FP16_SCALED,
    MANY_CHUNKS,
    PRECISION,
    ROUNDING,
    Bound,
    assert_close_rel,
    assert_equal,
    lean_bound,
    loss_tolerance,
    relative_error,
    smallest_error,
)

ARRAY = covering_array(DIMENSIONS)
PLAIN_ARRAY = covering_array(PLAIN_DIMENSIONS)
EVEN_ARRAY = covering_array(EVEN_DIMENSIONS)
BFLOAT16_ARRAYS = [
    pytest.param(case, id=f"{name}-{i:02}-{case_id(case)}")
    for name, array in (("plain", PLAIN_ARRAY), ("even", EVEN_ARRAY))
    for i, case in enumerate(array)
]
EXTRAS = ("z_loss", "token_accuracy", "predicted_tokens", "logsumexp")


def reference_of(call: Call) -> Gradients:
    return reference.linear_cross_entropy_gradients(
        call.input,
        call.linear_weight,
        call.target,
        linear_bias=call.linear_bias,
        grad_output=call.upstream,
        **call.options,
    )


def run(call: Call, trainable: str, extras: bool = False, **more: Any) -> tuple[Any, tuple[Tensor | None, ...]]:
    """The output and the gradients of input, weight and bias."""
    leaves = call.leaves(trainable)
    wanted = {f"return_{name}": extras for name in EXTRAS}
    out = syncfree_ext.linear_cross_entropy(
        leaves[0], leaves[1], call.target, linear_bias=leaves[2], **call.options, **wanted, **more
    )
    loss = out.loss if extras else out
    if loss.requires_grad:
        loss.backward(call.upstream)
    return out, tuple(None if leaf is None else leaf.grad for leaf in leaves)


def check_gradients(call: Call, ref: Gradients, grads: tuple[Tensor | None, ...], trainable: str) -> None:
    compute = call.input.dtype
    exact = call.options["reduction"] == "none" or math.frexp(float(call.upstream.abs().max()))[0] in (0.0, 0.5)
    bound = Bound(compute, ref.logit_max, exact)
    for name, leaf, grad, expected, noise in (
        ("x", call.input, grads[0], ref.dx.view(call.input.shape), ref.dx_noise),
        ("w", call.linear_weight, grads[1], ref.dw, ref.dw_noise),
        ("b", call.linear_bias, grads[2], ref.db, ref.db_noise),
    ):
        if leaf is None or name not in trainable:
            assert grad is None, f"d{name} of a frozen leaf"
            continue
        assert grad is not None, f"no d{name}"
        assert grad.dtype == leaf.dtype
        floor = smallest_error(grad.dtype, grad.numel())
        tol = bound.of(grad.dtype, noise, float(expected.norm()))
        assert_close_rel(grad, expected, tol, floor, f"d{name}")


def check_outputs(call: Call, ref: Gradients, out: Any) -> None:
    expected = ref.output
    wide = torch.float64 if call.input.dtype == torch.float64 else torch.float32
    ignored = expected.predicted_tokens == -1
    scored = int((~ignored).sum())
    tol = loss_tolerance(
        call.input.dtype, expected.loss, ref.logit_max, scored if call.options["reduction"] != "mean" else 1
    )
    for name in ("loss", "z_loss"):
        got = getattr(out, name)
        assert got.dtype == wide
        assert_close_rel(got, getattr(expected, name), 0.0, tol, name)
    assert out.logsumexp.dtype == wide
    lse_tol = loss_tolerance(call.input.dtype, expected.logsumexp, ref.logit_max, scored)
    assert_close_rel(out.logsumexp, expected.logsumexp, 0.0, lse_tol, "logsumexp")
    assert not out.logsumexp[ignored].any()

    # The argmax may be another class where two logits are equal to within their error.
    predicted = out.predicted_tokens
    assert predicted.dtype == torch.int64
    assert_equal(predicted == -1, ignored, "predicted_tokens of ignored rows")
    x = call.input.double()[~ignored]
    margin = torch.zeros(())
    if len(x):
        ours, best = (final_logit(call, x, p[~ignored]) for p in (predicted, expected.predicted_tokens))
        margin = (best - ours).max()
    error = (1e-12 if wide == torch.float64 else 1e-5) * max(1.0, ref.logit_max)
    assert float(margin) <= error, f"predicted a class that is {float(margin):.2e} below the best"
    hits = ((predicted == aligned_target(call)) & ~ignored).float()
    accuracy = hits if call.options["reduction"] == "none" else hits.sum() / max(scored, 1)
    assert out.token_accuracy.dtype == torch.float32
    assert_close_rel(out.token_accuracy, accuracy, 1e-6, what="token_accuracy")
    assert not any(getattr(out, name).requires_grad for name in EXTRAS)


def aligned_target(call: Call) -> Tensor:
    shift, out = call.options["shift"], torch.full_like(call.target, -100, memory_format=torch.contiguous_format)
    length = call.target.shape[-1]
    out[..., : max(0, length - shift)] = call.target[..., shift:]
    return out


def final_logit(call: Call, x: Tensor, classes: Tensor) -> Tensor:
    """The logit of one class for each row of x, in float64."""
    s = (x * call.linear_weight[classes].double()).sum(-1)
    if call.linear_bias is not None:
        s = s + call.linear_bias[classes].double()
    s = s * torch.as_tensor(call.options["logit_scale"]).to(s)
    cap = call.options["softcap"]
    return s if cap is None else cap * torch.tanh(s / cap)


@pytest.mark.parametrize(
    ("dimensions", "array"), [(DIMENSIONS, ARRAY), (PLAIN_DIMENSIONS, PLAIN_ARRAY), (EVEN_DIMENSIONS, EVEN_ARRAY)]
)
def test_every_pair_of_values_is_covered(dimensions: dict[str, Any], array: list[dict[str, Any]]) -> None:
    """Any two values of two dimensions meet; so does each value of each dimension with each dtype."""
    assert len(array) < 80
    for a, b in itertools.combinations(dimensions, 2):
        met = {(repr(row[a]), repr(row[b])) for row in array}
        assert met == {(repr(p), repr(q)) for p in dimensions[a] for q in dimensions[b]}, (a, b)


@pytest.mark.parametrize("case", ARRAY, ids=[f"{i:02}-{case_id(case)}" for i, case in enumerate(ARRAY)])
def test_covering_array(case: dict[str, Any], rng: torch.Generator, device: torch.device) -> None:
    if device.type == "cuda" and case["dtype"] == "float64":
        case = {**case, "dtype": "float32"}
    call = build(case, rng, device)
    ref = reference_of(call)
    out, grads = run(call, "xwb", extras=True, chunk_rows=case["chunk_rows"])
    check_outputs(call, ref, out)
    check_gradients(call, ref, grads, "xwb")
    # The same with some leaves frozen and without extras, which takes another way through the code.
    loss, grads = run(call, case["trainable"], chunk_rows=case["chunk_rows"])
    assert_equal(loss, out.loss, "loss without extras")
    assert loss.requires_grad == any(
        name in case["trainable"] for name in ("xw" if call.linear_bias is None else "xwb")
    )
    check_gradients(call, ref, grads, case["trainable"])


@pytest.mark.parametrize("case", BFLOAT16_ARRAYS)
def test_bfloat16_of_even_shapes(case: dict[str, Any], rng: torch.Generator, device: torch.device) -> None:
    call = build(case, rng, device)
    ref = reference_of(call)
    loss, grads = run(call, "xwb", chunk_rows=case["chunk_rows"])
    scored = int((ref.output.predicted_tokens != -1).sum()) if call.options["reduction"] != "mean" else 1
    tol = loss_tolerance(torch.bfloat16, ref.output.loss, ref.logit_max, scored)
    assert_close_rel(loss, ref.output.loss, 0.0, tol, "loss")
    check_gradients(call, ref, grads, "xwb")
    again, grads = run(call, case["trainable"], chunk_rows=case["chunk_rows"])
    assert_close_rel(again, loss, 1e-6, 1e-7, "loss with other gradients")
    check_gradients(call, ref, grads, case["trainable"])


def plain(
    kind: str, bt: int, h: int, v: int, dtype: torch.dtype, rng: torch.Generator, device: torch.device, **options: Any
) -> Call:
    x, w, target = (t.to(device) for t in data(kind, bt, h, v, rng))
    options = {"reduction": "mean", "shift": 0, "softcap": None, "logit_scale": 1.0, **options}
    return Call(x.to(dtype), w.to(dtype), target, None, options, torch.ones((), device=device))


# N = 1536 is no power of two; on CUDA the sizes of the promise, and N = 6144 and 8176 as well.
PRECISION_SIZES = [
    ("cpu", 1536, 512, 16000),
    pytest.param("cuda", 1536, 1024, 32000, marks=pytest.mark.cuda),
    pytest.param("cuda", 6144, 1024, 32000, marks=pytest.mark.cuda),
    pytest.param("cuda", 8176, 1024, 32000, marks=pytest.mark.cuda),
]


@pytest.mark.parametrize(("device", "bt", "h", "v"), PRECISION_SIZES, indirect=["device"])
@pytest.mark.parametrize(
    ("dtype", "kind"), [(d, k) for d, k in PRECISION if d in (torch.bfloat16, torch.float32)], ids=str
)
def test_precision(
    dtype: torch.dtype, kind: str, device: torch.device, bt: int, h: int, v: int, rng: torch.Generator
) -> None:
    promised = PRECISION[dtype, kind]
    for _ in range(3):  # a few rows of large loss can make up most of one draw's gradient
        call = plain(kind, bt, h, v, dtype, rng, device)
        ref = reference_of(call)
        loss, grads = run(call, "xwb")
        scale = max(1.0, ref.logit_max / 32) if dtype == torch.float32 else 1.0
        assert_close_rel(loss, ref.output.loss, promised["loss"], 1e-7, "loss")
        for name, grad, expected in (("dx", grads[0], ref.dx), ("dw", grads[1], ref.dw)):
            assert grad is not None
            assert expected is not None
            assert_close_rel(grad, expected, promised[name] * scale, what=name)


@pytest.mark.parametrize(
    ("device", "bt", "h", "v"),
    [("cpu", 1536, 256, 8000), pytest.param("cuda", 1536, 1024, 32000, marks=pytest.mark.cuda)],
    indirect=["device"],
)
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 30.0},
        {"label_smoothing": 0.1},
        {"weight": True},
        {"bias": True},
        {"weight": True, "bias": True, "label_smoothing": 0.1},
        {"weight": True, "bias": True, "softcap": 30.0},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("kind", ["unit", "confident", "trained"])
def test_precision_with_options(
    kind: str, options: dict[str, Any], device: torch.device, bt: int, h: int, v: int, rng: torch.Generator
) -> None:
    call = plain(kind, bt, h, v, torch.bfloat16, rng, device, **options)
    if options.get("bias"):
        del call.options["bias"]
        call.linear_bias = torch.randn(v, generator=rng).to(device)
    if options.get("weight"):
        call.options["weight"] = (torch.rand(v, generator=rng) + 0.25).to(device)
    ref = reference_of(call)
    loss, grads = run(call, "xwb")
    promised = PRECISION[torch.bfloat16, kind]
    assert_close_rel(loss, ref.output.loss, promised["loss"], 1e-7, "loss")
    for name, grad, expected in (("dx", grads[0], ref.dx), ("dw", grads[1], ref.dw)):
        assert_close_rel(grad, expected, promised[name], what=name)
    if options.get("bias"):
        assert_close_rel(grads[2], ref.db, promised["dw"], what="db")


@pytest.mark.parametrize("kind", ["unit", "confident"])
@pytest.mark.parametrize("upstream", [1.0, 65536.0])
def test_precision_of_float16(kind: str, upstream: float, rng: torch.Generator, device: torch.device) -> None:
    """The gradients of a mean over many rows are subnormal in float16, and a loss scaler must still protect them."""
    call = plain(kind, 1536, 256, 8000, torch.float16, rng, device)
    call.upstream = call.upstream * upstream
    ref = reference_of(call)
    loss, grads = run(call, "xwb")
    assert_close_rel(loss, ref.output.loss, 1e-4, 1e-7, "loss")
    for name, grad, expected in (("dx", grads[0], ref.dx), ("dw", grads[1], ref.dw)):
        rounded = relative_error(expected.half(), expected)
        assert_close_rel(grad, expected, 1.5 * rounded if upstream == 1 else FP16_SCALED, what=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_chunks_cost_no_accuracy(dtype: torch.dtype, rng: torch.Generator, device: torch.device) -> None:
    """dW over 32 chunks has at most 1.2 times the error of one product of the full size, rounded once."""
    rows = 128 if device.type == "cuda" else 48
    call = plain("unit", 32 * rows, 64, 2000, dtype, rng, device)
    call.upstream = call.upstream * 4096
    ref = reference_of(call)
    _, grads = run(call, "w", chunk_rows=rows)
    z = call.input.double() @ call.linear_weight.double().T
    g = torch.softmax(z, 1)
    g.scatter_add_(1, call.target[:, None], -torch.ones_like(g[:, :1]))
    single = (g.to(dtype).double().T @ call.input.double() * (4096 / len(g))).to(dtype)
    assert relative_error(grads[1], ref.dw) <= MANY_CHUNKS * relative_error(single, ref.dw)


@pytest.mark.parametrize("chunks", [1, 8, 32])
def test_lean_accumulation(chunks: int, rng: torch.Generator, device: torch.device) -> None:
    rows = 128 if device.type == "cuda" else 48
    call = plain("unit", chunks * rows, 64, 2000, torch.bfloat16, rng, device)
    ref = reference_of(call)
    loss, grads = run(call, "xw", chunk_rows=rows, accum_dtype=torch.bfloat16)
    assert_close_rel(loss, ref.output.loss, 1e-4, 1e-7, "loss")
    assert_close_rel(grads[0], ref.dx, 2.5e-3, what="dx")
    # With one chunk there is nothing to add up: both roundings, of g and of dW, remain.
    assert_close_rel(grads[1], ref.dw, max(lean_bound(chunks), 2.5e-3), what="dw")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_accum_dtype_float32_is_the_default(dtype: torch.dtype, rng: torch.Generator, device: torch.device) -> None:
    call = plain("unit", 300, 32, 500, dtype, rng, device)
    _, default = run(call, "xw", chunk_rows=64)
    _, explicit = run(call, "xw", chunk_rows=64, accum_dtype=torch.float32)
    for a, b in zip(default[:2], explicit[:2], strict=True):
        assert a is not None
        assert b is not None
        assert_equal(a, b)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("trainable", ["xwb", "w", "x", "b"])
def test_autocast(autocast: torch.dtype, trainable: str, rng: torch.Generator, device: torch.device) -> None:
    """float32 leaves: products in the autocast dtype, gradients in float32; the bias is not cast."""
    call = plain("unit", 700, 40, 900, torch.float32, rng, device)
    call.linear_bias = torch.randn(900, generator=rng).to(device)
    rounded = Call(
        call.input.to(autocast),
        call.linear_weight.to(autocast),
        call.target,
        call.linear_bias,
        call.options,
        call.upstream,
    )
    ref = reference_of(rounded)
    with torch.autocast(device.type, dtype=autocast):
        loss, grads = run(call, trainable, chunk_rows=128)
    assert loss.dtype == torch.float32
    assert_close_rel(loss, ref.output.loss, 1e-6, 1e-6, "loss")
    noises = (ref.dx_noise, ref.dw_noise, ref.db_noise)
    for name, grad, expected, noise in zip("xwb", grads, (ref.dx, ref.dw, ref.db), noises, strict=True):
        if name not in trainable:
            assert grad is None
            continue
        assert grad is not None
        assert grad.dtype == torch.float32
        # dx is rounded on its way through the cast of the input; dw must not be.
        kappa = noise / float(expected.norm())
        unrounded = 1.2 * ROUNDING[autocast] * kappa + 1e-5
        assert_close_rel(grad, expected, unrounded if name != "x" else unrounded + ROUNDING[autocast], what=f"d{name}")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_bitwise_repeatable(reduction: str, dtype: str, rng: torch.Generator, device: torch.device) -> None:
    if device.type == "cuda" and dtype == "float64":
        dtype = "float32"
    case = {name: values[-1] for name, values in DIMENSIONS.items()} | {
        "dtype": dtype, "bt": 1000, "h": 65, "v": 2000, "reduction": reduction, "token_weight": "float32",
        "bias": "float32", "label_smoothing": 0.1, "data": "unit", "ignored": "some", "upstream": 0.75,
    }  # fmt: skip
    call = build(case, rng, device)
    first = run(call, "xwb", extras=True, chunk_rows=256)
    for _ in range(4):
        again = run(call, "xwb", extras=True, chunk_rows=256)
        for a, b in zip((*first[0], *first[1]), (*again[0], *again[1]), strict=True):
            assert_equal(a, b)


def test_results_do_not_depend_on_the_other_gradients(rng: torch.Generator, device: torch.device) -> None:
    call = plain("unit", 500, 48, 700, torch.bfloat16, rng, device)
    call.linear_bias = torch.randn(700, generator=rng).to(device)
    _, together = run(call, "xwb", chunk_rows=128)
    for i, name in enumerate("xwb"):
        _, alone = run(call, name, chunk_rows=128)
        assert_equal(alone[i], together[i], f"d{name}")


@pytest.mark.parametrize("chunk_rows", [1, 2, 127, 128, 129, 10**6])
def test_chunk_sizes(chunk_rows: int, rng: torch.Generator, device: torch.device) -> None:
    call = plain("unit", 257, 16, 101, torch.float32, rng, device)
    ref = reference_of(call)
    loss, grads = run(call, "xw", chunk_rows=chunk_rows)
    assert_close_rel(loss, ref.output.loss, 1e-6, 1e-7)
    check_gradients(call, ref, grads, "xw")


@pytest.mark.parametrize("workspace_bytes", [1, 5000, 2**30])
def test_workspace_sizes(workspace_bytes: int, rng: torch.Generator, device: torch.device) -> None:
    call = plain("unit", 300, 16, 101, torch.float32, rng, device)
    ref = reference_of(call)
    loss, grads = run(call, "xw", workspace_bytes=workspace_bytes)
    assert_close_rel(loss, ref.output.loss, 1e-6, 1e-7)
    check_gradients(call, ref, grads, "xw")


def test_matches_torch_on_a_small_model(rng: torch.Generator, device: torch.device) -> None:
    """An end-to-end check that does not go through the reference."""
    call = plain("unit", 64, 16, 50, torch.float32, rng, device)
    x, w, _ = call.leaves("xw")
    expected = torch.nn.functional.cross_entropy(x @ w.T, call.target)
    dx, dw = torch.autograd.grad(expected, [x, w])
    loss, grads = run(call, "xw")
    assert_close_rel(loss, expected, 1e-6)
    assert_close_rel(grads[0], dx, 1e-5)
    assert_close_rel(grads[1], dw, 1e-5)
