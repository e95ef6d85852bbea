"""The Hopper path over slices of the vocabulary, whose ranks are threads: values, ignored rows, repaired rows.

On the CPU its ops are those of fused_slices.py, so that the driver and the arithmetic are tested everywhere; on a GPU
of compute capability 9.0 they are the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import fused_slices  # gives the CPU the ops
import syncfree_ext as sf
from cases import Call, build, case_id, data
from fuzz_threads import ThreadRanks
from helpers import poisoned_memory
from syncfree_ext import functional
from syncfree_ext.integrations import _vocab_parallel
from syncfree_ext.integrations._vocab_parallel_chunks import FusedChunks
from test_fakes import assert_fake_agrees
from test_values import PLAIN_ARRAY, check_gradients, check_outputs, reference_of
from tolerances import PRECISION, assert_close_rel, assert_equal, lean_bound, relative_error

assert fused_slices

CUTS = pytest.mark.parametrize("cuts", [(1.0,), (0.5, 1.0), (0.25, 0.25, 1.0), (0.0, 0.7, 1.0)], ids=str)


@pytest.fixture(autouse=True)
def taken(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU too, every call takes the Hopper path."""
    if device.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    if device.type == "cpu":

        def rows(part: _vocab_parallel.VocabSlice, input: Tensor, *_: Any) -> int:
            return min(part.chunk_rows or 512, input.shape[0])

        monkeypatch.setattr(_vocab_parallel.VocabSlice, "rows_of_a_fused_chunk", rows)


def score(
    call: Call, cuts: Sequence[float], trainable: str = "xw", chunk_rows: int | None = None, lean: bool = False,
    extras: bool = True,
) -> tuple[Any, tuple[Tensor | None, Tensor | None, None]]:  # fmt: skip
    """What one process would get, from slices that end at these fractions of the classes."""
    v, o = call.linear_weight.shape[0], dict(call.options)
    ends = [round(fraction * v) for fraction in cuts]
    options = functional._loss_options(
        "slices", call.input, v, call.target, o.get("weight"), o.get("token_weight"), o.get("num_items"),
        o["reduction"], o.get("ignore_index"), 0.0, o["softcap"], o.get("token_scaling", False), o["logit_scale"],
        o.get("z_loss_weight", 0.0), o["shift"],
    )  # fmt: skip
    per_row = o["reduction"] == "none"
    if per_row:
        # As backward recomputes it.
        factor = call.upstream.view(call.target.shape).roll(o["shift"], -1).float()
        weights = options["token_weight"]
        with_upstream = options | {"token_weight": factor if weights is None else factor * weights}
    x, target = functional._as_matrix(call.input), functional._as_sequences(call.target)
    ranks = ThreadRanks(len(cuts))

    def job(rank: int) -> tuple[Any, Any]:
        first = ends[rank - 1] if rank else 0
        part = _vocab_parallel.VocabSlice(
            group=None,  # type: ignore[arg-type]
            first_class=first,
            num_classes=v,
            compute_dtype=torch.bfloat16,
            lean=lean,
            chunk_rows=chunk_rows,
            workspace_bytes=None,
        )
        own = call.linear_weight[first : ends[rank]]
        with torch.no_grad():
            needs = ["x" in trainable, "w" in trainable, False]
            run = _vocab_parallel.Run(part, x, own, None, target, options)
            assert run.chunks is FusedChunks
            outputs, gradients = run.forward([False] * 3 if per_row else needs, extras, extras, extras)
            if per_row:
                gradients = _vocab_parallel.Run(part, x, own, None, target, with_upstream)(*needs).gradients
        return outputs, gradients

    with poisoned_memory(x.device):
        results = ranks.run(job)
    for outputs, gradients in results[1:]:
        for a, b in zip((*outputs, gradients.dx), (*results[0][0], results[0][1].dx), strict=True):
            assert_equal(a, b, "what the ranks return")
    out = functional._named_outputs(tuple(results[0][0]), call.target, o["reduction"], *[extras] * 4)
    scale = 1.0 if per_row else float(call.upstream)
    dx = results[0][1].dx.view(call.input.shape) * scale if "x" in trainable else None
    dw = torch.cat([gradients.dw for _, gradients in results]) * scale if "w" in trainable else None
    return out, (dx, dw, None)


def plain(kind: str, bt: int, h: int, v: int, rng: torch.Generator, device: torch.device, **options: Any) -> Call:
    x, w, target = (t.to(device) for t in data(kind, bt, h, v, rng))
    options = {"reduction": "mean", "shift": 0, "softcap": None, "logit_scale": 1.0, **options}
    return Call(x.bfloat16(), w.bfloat16(), target, None, options, torch.ones((), device=device))


@pytest.mark.parametrize("case", PLAIN_ARRAY, ids=[f"{i:02}-{case_id(case)}" for i, case in enumerate(PLAIN_ARRAY)])
def test_plain_options(case: dict[str, Any], rng: torch.Generator, device: torch.device) -> None:
    call = build(case, rng, device)
    cuts = [[*sorted(torch.rand(2, generator=rng).tolist()), 1.0], (0.5, 1.0), (1.0,)][case["bt"] % 3]
    ref = reference_of(call)
    out, gradients = score(call, cuts, chunk_rows=case["chunk_rows"])
    check_outputs(call, ref, out)
    check_gradients(call, ref, gradients, "xw")


@CUTS
@pytest.mark.parametrize("name", ["class weights", "softcap", "both"])
def test_options(name: str, cuts: tuple[float, ...], rng: torch.Generator, device: torch.device) -> None:
    call = plain("confident", 300, 64, 1001, rng, device, z_loss_weight=1e-3, logit_scale=-0.7)
    if name != "softcap":
        call.options["weight"] = torch.rand(1001, generator=rng).add(0.25).to(device)
    if name != "class weights":
        call.options["softcap"] = 7.0
    ref = reference_of(call)
    out, gradients = score(call, cuts, chunk_rows=128)
    check_outputs(call, ref, out)
    check_gradients(call, ref, gradients, "xw")


@CUTS
@pytest.mark.parametrize("kind", ["unit", "confident"])
def test_precision(kind: str, cuts: tuple[float, ...], rng: torch.Generator, device: torch.device) -> None:
    call = plain(kind, 1536, 256, 8064, rng, device)
    ref = reference_of(call)
    out, (dx, dw, _) = score(call, cuts, chunk_rows=768, extras=False)
    promised = PRECISION[torch.bfloat16, kind]
    assert_close_rel(out.loss, ref.output.loss, promised["loss"], 1e-7, "loss")
    assert_close_rel(dx, ref.dx, promised["dx"], what="dx")
    assert_close_rel(dw, ref.dw, promised["dw"], what="dw")


@CUTS
@pytest.mark.parametrize("offset", [-300.0, 300.0])
def test_a_common_offset(offset: float, cuts: tuple[float, ...], rng: torch.Generator, device: torch.device) -> None:
    """Exponents come from the target's logit, whichever slice has it, and a row of gradients adds up to 0 over all.

    Else the column that all classes share would show what rounding took.
    """
    call = plain("unit", 300, 64, 40, rng, device)
    call.input[:, 0], call.linear_weight[:, 0] = 8, offset / 8
    ref = reference_of(call)
    out, gradients = score(call, cuts, chunk_rows=128)
    check_outputs(call, ref, out)
    check_gradients(call, ref, gradients, "xw")
    assert_close_rel(gradients[0], ref.dx, PRECISION[torch.bfloat16, "unit"]["dx"], what="dx")


@CUTS
@pytest.mark.parametrize("ignored", [0.3, 0.9, 1.0])
def test_ignored_rows(ignored: float, cuts: tuple[float, ...], rng: torch.Generator, device: torch.device) -> None:
    """Wherever they lie, what they leave is 0, and the rest is what it is without them."""
    call = plain("unit", 1000, 64, 512, rng, device)
    call.target[(torch.rand(1000, generator=rng) < ignored).to(device)] = -100
    ref = reference_of(call)
    out, gradients = score(call, cuts, chunk_rows=256)
    check_outputs(call, ref, out)
    check_gradients(call, ref, gradients, "xw")
    assert not gradients[0][call.target < 0].any()


@pytest.mark.parametrize("nats", [60, 80, 110, 160, 400])
@pytest.mark.parametrize("where", ["the target's slice", "another slice", "both"])
def test_rows_of_large_loss(nats: float, where: str, rng: torch.Generator, device: torch.device) -> None:
    """A slice takes another exponent where its logits are far above the target's; the other one need not."""
    call = plain("unit", 600, 64, 400, rng, device)
    raise_logits(call, nats, where, slice(None, None, 3), rng)
    ref = reference_of(call)
    assert float(ref.output.loss) > nats / 4
    out, gradients = score(call, (0.5, 1.0), chunk_rows=256)
    check_outputs(call, ref, out)
    check_gradients(call, ref, gradients, "xw")


@pytest.mark.parametrize("nats", [30, 40, 50, 57, 64])
@pytest.mark.parametrize("where", ["the target's slice", "another slice", "both"])
def test_token_scaling_by_vanishing_probabilities(
    nats: float, where: str, rng: torch.Generator, device: torch.device
) -> None:
    call = plain("unit", 300, 64, 400, rng, device, reduction="sum", token_scaling=True)
    raise_logits(call, nats, where, slice(None), rng)
    ref = reference_of(call)
    _, gradients = score(call, (0.5, 1.0), chunk_rows=256)
    check_gradients(call, ref, gradients, "xw")


def raise_logits(call: Call, nats: float, where: str, rows: slice, rng: torch.Generator) -> None:
    """One class of a slice, or of both halves, far above the targets, which are all of the first half."""
    v = call.linear_weight.shape[0]
    high = {"the target's slice": [3], "another slice": [v - 3], "both": [3, v - 3]}[where]
    x, w = call.input.float() * 0.1, call.linear_weight.float()
    w[:, 0], w[high, 0] = 0, nats / 8
    x[rows, 0] = 8
    call.input, call.linear_weight = x.bfloat16(), w.bfloat16()
    call.target[:] = torch.randint(5, v // 2, call.target.shape, generator=rng).to(call.target)


@pytest.mark.parametrize("bad", ["target", "input", "weight"])
def test_what_is_not_finite_stays_visible(bad: str, rng: torch.Generator, device: torch.device) -> None:
    call = plain("unit", 40, 64, 200, rng, device, reduction="none")
    call.upstream = torch.ones(40, device=device)
    rows = torch.zeros(40, dtype=torch.bool, device=device)
    if bad == "target":
        call.target[7], call.target[20] = 200, -3
        rows[[7, 20]] = True
    elif bad == "input":
        call.input[7, 3] = math.nan
        rows[7] = True
    else:
        call.linear_weight[150, 3] = math.nan
        rows[:] = True
    if bad == "target" and device.type == "cpu":
        pytest.skip("count_targets refuses it on the CPU")
    out, (dx, _, _) = score(call, (0.5, 1.0))
    assert_equal(~out.loss.isfinite(), rows)
    assert_equal(dx.isnan().any(1), rows)


@pytest.mark.parametrize("chunks", [1, 4])
def test_lean(chunks: int, rng: torch.Generator, device: torch.device) -> None:
    call = plain("unit", 256 * chunks, 128, 1024, rng, device)
    ref = reference_of(call)
    _, (_, dw, _) = score(call, (0.5, 1.0), chunk_rows=256, lean=True)
    assert relative_error(dw, ref.dw) < max(lean_bound(chunks), 2.5e-3)


@pytest.mark.parametrize("trainable", ["x", "w", ""])
def test_what_is_not_needed(trainable: str, rng: torch.Generator, device: torch.device) -> None:
    """The same bits, whatever else is asked for."""
    call = plain("unit", 300, 64, 640, rng, device)
    out, whole = score(call, (0.3, 1.0), chunk_rows=128)
    again, some = score(call, (0.3, 1.0), trainable, chunk_rows=128, extras=False)
    assert_equal(again.loss, out.loss)
    for name, a, b in zip("xw", whole, some, strict=False):
        if name in trainable:
            assert_equal(a, b, f"d{name}")
        else:
            assert b is None


@pytest.mark.cuda
@pytest.mark.parametrize("ignored", [0.0, 0.5])
def test_one_slice_is_the_whole_head(ignored: float, rng: torch.Generator, device: torch.device) -> None:
    """Slices differ from the head of one GPU by what float32 sums differ by, and a repeated call by nothing."""
    call = plain("unit", 3000, 512, 16000, rng, device)
    call.target[(torch.rand(3000, generator=rng) < ignored).to(device)] = -100
    x, w = call.input.clone().requires_grad_(), call.linear_weight.clone().requires_grad_()
    loss = sf.linear_cross_entropy(x, w, call.target, chunk_rows=1024)
    expected = torch.autograd.grad(loss, (x, w))
    for cuts in ((1.0,), (0.5, 1.0), (0.1, 0.1, 0.4, 1.0)):
        out, gradients = score(call, cuts, chunk_rows=1024)
        assert_close_rel(out.loss, loss, 1e-6)
        for a, b, name in zip(gradients, expected, ("dx", "dw"), strict=False):
            assert_close_rel(a, b, 1.2e-3, what=name)  # where a sum lies between two bfloat16 numbers
        again, repeated = score(call, cuts, chunk_rows=1024)
        assert_equal(again.loss, out.loss)
        for a, b in zip(gradients[:2], repeated[:2], strict=True):
            assert_equal(a, b)


@pytest.mark.cuda
def test_rows_that_are_not_aligned(rng: torch.Generator, device: torch.device) -> None:
    call = plain("unit", 300, 64, 640, rng, device)
    out, expected = score(call, (0.3, 1.0), chunk_rows=128)
    shifted = torch.empty(300 * 64 + 1, dtype=torch.bfloat16, device=device)[1:].view(300, 64)
    call.input = shifted.copy_(call.input)
    call.linear_weight = call.linear_weight.T.contiguous().T
    again, gradients = score(call, (0.3, 1.0), chunk_rows=128)
    assert_equal(again.loss, out.loss)
    for a, b in zip(gradients[:2], expected[:2], strict=True):
        assert_equal(a, b)


# ------------------------------------------------------------------------------------------------------- registrations

ops = torch.ops.syncfree


def all_calls(
    rng: torch.Generator, device: torch.device, classes: int = 64, lean: bool = False
) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Op, arguments and options of each step of the second of two chunks, from the results of the steps before."""
    call = plain("unit", 300, 128, 320, rng, device)
    call.target[::3] = -100
    weight = call.linear_weight[64 : 64 + classes]
    counts, order = ops.count_targets(call.target, 320)
    place = {"first_class": 64, "num_classes": 320}
    data = call.input, weight, call.target, counts, order
    begin = data, {**place, "chunk_rows": 150, "weight_dtype": torch.bfloat16, "lean": lean}
    target_logits, class_rows, dw, low = ops.flce_shard_fused_begin(*data, **begin[1])
    predicted, largest = torch.empty(300, dtype=torch.int64, device=device), torch.empty(300, device=device)
    second = {**place, "first_row": 150}
    logits = (*data, target_logits), {**second, "chunk_rows": 150, "predicted_tokens": predicted, "largest": largest}
    gathered, e, stats = ops.flce_shard_fused_logits(*logits[0], **logits[1])
    rows = torch.empty((4, 300), device=device).unbind()
    gradient = (e, stats, stats.clone(), *data[1:], *rows), second
    dx_sum, v = ops.flce_shard_fused_gradient(*gradient[0], **second)
    first_row = {"first_row": 150}
    product = (e, gathered, v, counts, order, class_rows, dw, low), {**first_row, "accumulate": False}
    ops.flce_shard_fused_weight_gradient(*product[0], **product[1])
    targets = call.input, counts, order, class_rows, rows[0], dw, low
    out = () if dw.dtype == torch.bfloat16 else (torch.empty_like(dw, dtype=torch.bfloat16),)
    return {
        "begin": (ops.flce_shard_fused_begin, *begin),
        "begin without dw": (ops.flce_shard_fused_begin, data, {**begin[1], "need_dw": False}),
        "logits": (ops.flce_shard_fused_logits, *logits),
        "statistics": (ops.flce_shard_fused_logits, logits[0], {**second, "chunk_rows": 150, "need_e": False}),
        "gradient": (ops.flce_shard_fused_gradient, *gradient),
        "losses": (ops.flce_shard_fused_gradient, gradient[0][:-1], {**second, "need_dx": False}),
        "weight gradient": (ops.flce_shard_fused_weight_gradient, *product),
        "accumulate": (ops.flce_shard_fused_weight_gradient, product[0], {**first_row, "accumulate": True}),
        "targets": (ops.flce_shard_fused_add_targets, (*targets, *out), {}),
        "dx": (ops.flce_shard_fused_store_dx, (dx_sum, counts, order, torch.empty_like(call.input)), first_row),
    }


CALLS = (
    "begin", "begin without dw", "logits", "statistics", "gradient", "losses", "weight gradient", "accumulate",
    "targets", "dx",
)  # fmt: skip


@pytest.mark.parametrize("classes", [64, 40, 0])
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str, classes: int, device: torch.device, rng: torch.Generator) -> None:
    op, args, options = all_calls(rng, device, classes)[name]
    # The kernels leave rows past the live ones unwritten, so that two runs cannot be compared.
    opcheck(op.default, args, options, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("classes", [64, 40, 0])
def test_fakes(classes: int, lean: bool, device: torch.device, rng: torch.Generator) -> None:
    for op, args, options in all_calls(rng, device, classes, lean).values():
        returned = op(*args, **options)
        if returned is None:
            continue
        assert_fake_agrees(op, *args, **options)


def test_autograd_is_refused(device: torch.device, rng: torch.Generator) -> None:
    for op, args, options in all_calls(rng, device).values():
        with_grad = tuple(
            a.detach().clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
        )
        with pytest.raises(RuntimeError, match=f"syncfree::{op.__name__}: autograd is not supported"):
            op(*with_grad, **options)


WIDE = {"compute_dtype": torch.bfloat16, "weight_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": torch.float16}, {"weight_dtype": torch.float16}, {"biased": True},
        {"label_smoothing": 0.1}, {"softcap": 1e7},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_left_to_the_general_path(options: dict[str, Any], device: torch.device) -> None:
    x = torch.zeros(300, 64, dtype=torch.bfloat16, device=device)
    assert ops.flce_shard_fused_rows(x, 1000, **WIDE | options) == 0
    assert ops.flce_shard_fused_rows(x[:, :60], 1000, **WIDE) == 0
    assert ops.flce_shard_fused_rows(x[:0], 1000, **WIDE) == 0
    assert ops.flce_shard_fused_rows(x.half(), 1000, **WIDE) == 0


@pytest.mark.cuda
def test_the_rows_of_a_chunk(device: torch.device) -> None:
    x = torch.zeros(5000, 4096, dtype=torch.bfloat16, device=device)
    assert ops.flce_shard_fused_rows(x, 64128, **WIDE, chunk_rows=300) == 384
    assert ops.flce_shard_fused_rows(x, 64128, **WIDE, chunk_rows=9000) == 5000
    for more in ({}, {"lean": True}, {"workspace_bytes": 2**28}):
        rows = ops.flce_shard_fused_rows(x, 64128, **WIDE, **more)
        assert rows % 256 == 0
        assert 0 < rows * 64128 * 2 <= more.get("workspace_bytes", 2**30)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("begin", {"first_class": 300}, "the slice must lie within the 320 classes, got 64 from 300"),
        ("begin", {"chunk_rows": 0}, "a chunk must be one of those of 0 rows"),
        ("begin", {"linear_weight": torch.zeros(64, 128)}, "linear_weight must be bfloat16, got float32"),
        ("logits", {"first_row": 100}, "a chunk must be one of those of 150 rows from row 0 on"),
        ("logits", {"label_smoothing": 0.1}, "expected no label_smoothing"),
        ("logits", {"largest": None}, "predicted_tokens and largest come together"),
        ("logits", {"target_logits": torch.zeros(299)}, "target_logits must have shape"),
        ("gradient", {"row_stats": torch.zeros(3, 150)}, "row_stats must have shape"),
        ("gradient", {"ce": torch.zeros(299)}, "ce must have shape"),
        ("weight gradient", {"dw_low": torch.zeros(7, dtype=torch.uint8)}, "dw_low must have shape"),
        ("weight gradient", {"class_rows": torch.zeros(7, dtype=torch.int32)}, "class_rows must have shape"),
        ("targets", {"dw_low": torch.zeros(7, dtype=torch.uint8)}, "dw_low must have shape"),
        ("dx", {"dx": torch.zeros(300, 64)}, "dx must have shape"),
    ],
)
def test_arguments(name: str, change: dict[str, Any], message: str, device: torch.device, rng: torch.Generator) -> None:
    op, args, options = all_calls(rng, device)[name]
    arguments = {a.name: value for a, value in zip(op.default._schema.arguments, args, strict=False)} | options
    arguments |= {key: value.to(device) if isinstance(value, Tensor) else value for key, value in change.items()}
    with pytest.raises(ValueError, match=message):
        op(**arguments)
