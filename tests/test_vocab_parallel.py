"""vocab_parallel_linear_cross_entropy on 2 and 4 processes, against the reference and the head of one process.

Every rank must return the same bits, and the slices' gradients make up the whole one.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import syncfree_ext
from cases import DIMENSIONS, Call, build, case_id, covering_array, data
from helpers import ALL_EXTRAS
from rank_jobs import own, score
from ranks import Ranks
from syncfree_ext.integrations.distributed import vocab_parallel_linear_cross_entropy
from test_values import check_gradients, check_outputs, reference_of
from tolerances import (
    MANY_CHUNKS,
    PRECISION,
    ROUNDOFF,
    assert_close_rel,
    assert_equal,
    lean_bound,
    loss_tolerance,
    relative_error,
)

ARRAY = covering_array(
    {
        **DIMENSIONS,
        "bt": (1, 7, 129),
        "h": (1, 8, 65),
        "v": (2, 17, 513),  # 2 classes leave some of 4 ranks without any
        "slices": ("plain", "dtensor", "uneven"),
        "chunk_rows": (None, 50),
        "x_layout": ("contiguous", "transposed", "pitched"),
        "w_layout": ("contiguous", "transposed", "pitched"),
        "trainable": ("xwb", "x", "wb", ""),
    }
)

SIZES = pytest.mark.parametrize("ranks", [2, 4], indirect=True, ids=["2 ranks", "4 ranks"])


def seed_of(rng: torch.Generator) -> int:
    return int(torch.randint(2**31, (), generator=rng))


def joined(answers: list[Any]) -> tuple[Any, list[tuple[Tensor | None, ...]]]:
    """One answer from those of all ranks, whose common parts must be the same bits."""
    out, gradients = answers[0]
    outs = [(a,) if isinstance(a, Tensor) else a for a, _ in answers]
    for other in outs[1:]:
        for a, b in zip(outs[0], other, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_equal(a, b, "what the ranks return")
    whole = []
    for i in range(len(gradients)):
        parts = [answer[1][i] for answer in answers]
        for dx, _, _ in parts[1:]:
            if dx is not None:
                assert_equal(dx, parts[0][0], "dx of the ranks")
        dw, db = (None if parts[0][k] is None else torch.cat([part[k] for part in parts]) for k in (1, 2))
        whole.append((parts[0][0], dw, db))
    return out, whole


def plain_call(kind: str, bt: int, h: int, v: int, dtype: torch.dtype, rng: torch.Generator, **options: Any) -> Call:
    x, w, target = data(kind, bt, h, v, rng)
    options = {"reduction": "mean", "shift": 0, "softcap": None, "logit_scale": 1.0, **options}
    return Call(x.to(dtype), w.to(dtype), target, None, options, torch.ones(()))


def check(call: Call, answers: list[Any], trainable: str = "xwb") -> None:
    out, gradients = joined(answers)
    ref = reference_of(call)
    if call.options["reduction"] == "mean" and ref.output.loss.isnan():
        assert out.loss.isnan(), "class weights of the targets that add up to 0"
        return
    if isinstance(out, Tensor):
        rows = ref.output.loss.numel() if call.options["reduction"] == "none" else 1
        tol = loss_tolerance(call.input.dtype, ref.output.loss, ref.logit_max, rows)
        assert_close_rel(out, ref.output.loss, 0.0, tol, "loss")
    else:
        check_outputs(call, ref, out)
    for each in gradients:
        check_gradients(call, ref, each, trainable)


@SIZES
@pytest.mark.parametrize("case", ARRAY, ids=[f"{i:02}-{case_id(case)}" for i, case in enumerate(ARRAY)])
def test_options(case: dict[str, Any], ranks: Ranks, rng: torch.Generator) -> None:
    call = build(case, rng)
    trainable = case["trainable"] if call.linear_bias is not None else case["trainable"].replace("b", "")
    answers = ranks(score, call, trainable, case["slices"], seed_of(rng), chunk_rows=case["chunk_rows"], **ALL_EXTRAS)
    check(call, answers, trainable)
    single = syncfree_ext.linear_cross_entropy(
        call.input, call.linear_weight, call.target, linear_bias=call.linear_bias, **call.options
    )
    out = answers[0][0]
    if out.loss.isnan().all():
        return
    tol = loss_tolerance(call.input.dtype, single, 30.0, single.numel())
    assert_close_rel(out.loss, single, 0.0, tol, "loss of one process")


@pytest.mark.parametrize("kind", ["confident", "trained", "outliers", "far"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_data(kind: str, dtype: torch.dtype, ranks: Ranks, rng: torch.Generator) -> None:
    call = plain_call(kind, 129, 64, 517, dtype, rng)
    check(call, ranks(score, call, "xw", chunk_rows=64), "xw")


@SIZES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_precision_beside_a_large_mean_row(dtype: torch.dtype, ranks: Ranks, rng: torch.Generator) -> None:
    """What rounding takes from the gradients of the logits must not reach dX times the mean row of the weight."""
    call = plain_call("unit", 1000, 128, 2048, torch.float32, rng)
    call.input *= 4  # a few classes take most of a row, in any slice
    call.linear_weight += 5 * torch.randn(128, generator=rng) / 128**0.5
    call.input, call.linear_weight = call.input.to(dtype), call.linear_weight.to(dtype)
    expected = reference_of(call).dx
    dx = joined(ranks(score, call, "xw"))[1][0][0]
    assert dx is not None
    rounded = relative_error(expected.to(dtype), expected)
    promised = PRECISION[dtype, "unit"]["dx"] * (rounded if dtype == torch.float16 else 1.0)
    assert_close_rel(dx, expected, promised, what="dx")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_second_backward(reduction: str, dtype: torch.dtype, ranks: Ranks, rng: torch.Generator) -> None:
    """It computes the gradients anew, after the first ones were given away."""
    call = plain_call("unit", 40, 16, 101, dtype, rng, reduction=reduction, shift=1)
    call.target, call.options["token_weight"] = call.target.view(4, 10), torch.rand(4, 10, generator=rng) + 0.125
    call.input = call.input.view(4, 10, 16)
    shape = (4, 10) if reduction == "none" else ()
    call.upstream = torch.randn(shape, generator=rng) if reduction == "none" else torch.tensor(4.0)
    check(call, ranks(score, call, "xw", backwards=2, chunk_rows=16), "xw")


@SIZES
@pytest.mark.parametrize("case", ["no row", "all ignored", "one row", "shift past the end"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_few_rows(case: str, reduction: str, ranks: Ranks, rng: torch.Generator) -> None:
    call = plain_call("unit", {"no row": 0, "one row": 1}.get(case, 6), 8, 33, torch.float32, rng, reduction=reduction)
    call.linear_bias = torch.randn(33, generator=rng)
    if case == "all ignored":
        call.target[:] = -100
    if case == "shift past the end":
        call.options["shift"] = 9
    if reduction == "none":
        call.upstream = torch.randn(call.target.shape, generator=rng)
    answers = ranks(score, call, "xwb", **ALL_EXTRAS)
    check(call, answers)
    if case != "one row":
        out, [(dx, dw, db)] = joined(answers)
        for tensor in (out.loss, out.token_accuracy, dx, dw, db):
            assert not tensor.any(), "exactly 0"
        assert (out.predicted_tokens == -1).all()


@SIZES
def test_the_lowest_of_equal_logits_is_predicted(ranks: Ranks, rng: torch.Generator) -> None:
    """Ties within a slice and between slices; the target may be among them."""
    x, few = torch.randn(64, 8, generator=rng), torch.randn(3, 8, generator=rng)
    w = few[torch.randint(0, 3, (29,), generator=rng)]
    w[:3] = few[torch.randperm(3, generator=rng)]  # an exact power of two, so that equal rows give equal logits
    x, w = x.round(), w.round()
    target = torch.randint(0, 29, (64,), generator=rng)
    call = Call(x, w, target, None, {"reduction": "none"}, torch.ones(64))
    out, _ = joined(ranks(score, call, "", **ALL_EXTRAS))
    predicted = (x @ w.T).argmax(1)
    assert_equal(out.predicted_tokens, predicted)
    assert_equal(out.token_accuracy, (predicted == target).float())


@SIZES
def test_logits_of_minus_infinity(ranks: Ranks, rng: torch.Generator) -> None:
    """Through the bias: whole slices of them, targets among them (an infinite loss), and all but the target."""
    call = plain_call("unit", 30, 8, 40, torch.float32, rng, reduction="none")
    call.linear_bias = torch.zeros(40)
    call.linear_bias[:20] = -math.inf
    call.linear_bias[20::2] = -math.inf
    call.upstream = (call.linear_bias[call.target] == 0).float()
    out, [(dx, dw, _)] = joined(ranks(score, call, "xw"))
    ref = reference_of(call)
    finite = ref.output.loss.isfinite()
    assert_equal(out.isposinf(), ~finite)
    assert_close_rel(out[finite], ref.output.loss[finite], 1e-6, 1e-7)
    single = syncfree_ext.linear_cross_entropy(
        call.input, call.linear_weight, call.target, linear_bias=call.linear_bias, reduction="none"
    )
    assert_equal(out.isposinf(), single.isposinf())
    assert_close_rel(dx[finite], ref.dx[finite], 1e-5)

    call.linear_bias[:] = -math.inf
    call.linear_bias[7], call.target[:] = 0, 7
    call.upstream = torch.ones(30)
    out, [(dx, dw, _)] = joined(ranks(score, call, "xw"))
    for tensor in (out, dx, dw):
        assert not tensor.any(), "a certain row"


def test_a_common_offset_costs_no_digits(ranks: Ranks, rng: torch.Generator) -> None:
    """Label smoothing sums logits relative to one of them, which a slice without the target has to choose itself."""
    call = plain_call("unit", 50, 8, 300, torch.float32, rng, label_smoothing=0.3, reduction="sum")
    call.linear_bias = torch.full((300,), 4096.0)
    out, _ = joined(ranks(score, call, "x"))
    exact = torch.nn.functional.cross_entropy(
        call.input.double() @ call.linear_weight.double().T, call.target, label_smoothing=0.3, reduction="sum"
    )
    # A logit of 2^12 is rounded to a multiple of 2^-11; what a sum of 300 of them would lose is 300 times that.
    assert_close_rel(out, exact, 0.0, 2.0**-12 * 50**0.5 * 4)


@pytest.mark.parametrize("chunks", [1, 4])
def test_lean(chunks: int, ranks: Ranks, rng: torch.Generator) -> None:
    call = plain_call("unit", 64 * chunks, 64, 1000, torch.bfloat16, rng)
    ref = reference_of(call)
    _, [(dx, dw, _)] = joined(ranks(score, call, "xw", chunk_rows=64, accum_dtype=torch.bfloat16))
    assert_close_rel(dx, ref.dx, 2.5e-3, what="dx")
    assert_close_rel(dw, ref.dw, max(lean_bound(chunks), 2.5e-3), what="dw")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_chunks_cost_no_accuracy(dtype: torch.dtype, ranks: Ranks, rng: torch.Generator) -> None:
    """dW over 32 chunks has at most 1.2 times the error of one product of the full size, rounded once."""
    call = plain_call("unit", 32 * 48, 64, 1000, dtype, rng)
    call.upstream = call.upstream * 4096
    ref = reference_of(call)
    _, [(_, dw, _)] = joined(ranks(score, call, "w", chunk_rows=48))
    g = torch.softmax(call.input.double() @ call.linear_weight.double().T, 1)
    g.scatter_add_(1, call.target[:, None], -torch.ones_like(g[:, :1]))
    single = (g.to(dtype).double().T @ call.input.double() * (4096 / len(g))).to(dtype)
    assert relative_error(dw, ref.dw) <= MANY_CHUNKS * relative_error(single, ref.dw)


def under_autocast(call: Call, dtype: torch.dtype) -> Any:
    with torch.autocast("cpu", dtype=dtype):
        return score(call, "xwb", chunk_rows=50)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, ranks: Ranks, rng: torch.Generator) -> None:
    call = plain_call("unit", 129, 40, 300, torch.float32, rng)
    call.linear_bias = torch.randn(300, generator=rng)
    out, [(dx, dw, db)] = joined(ranks(under_autocast, call, dtype))
    rounded = Call(
        call.input.to(dtype), call.linear_weight.to(dtype), call.target, call.linear_bias, call.options, call.upstream
    )
    ref = reference_of(rounded)
    assert_close_rel(out, ref.output.loss, 1e-6, 1e-6)
    for name, grad, expected, noise in (
        ("dx", dx, ref.dx, ref.dx_noise), ("dw", dw, ref.dw, ref.dw_noise), ("db", db, ref.db, ref.db_noise),
    ):  # fmt: skip
        assert grad.dtype == torch.float32
        bound = 1.7 * ROUNDOFF[dtype] * noise / float(expected.norm()) + 1e-5
        assert_close_rel(grad, expected, bound + ROUNDOFF[dtype] * (name == "dx"), what=name)


def sharded_sequence(call: Call) -> tuple[Any, ...]:
    """x and target as DTensors that are sharded over the sequence."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = distribute_tensor(call.input, mesh, [Shard(1)]).requires_grad_()
    target = distribute_tensor(call.target, mesh, [Shard(1)])
    w = distribute_tensor(call.linear_weight, mesh, [Shard(0)]).requires_grad_()
    loss = vocab_parallel_linear_cross_entropy(x, w, target, **call.options)
    dx, dw = torch.autograd.grad(loss, (x, w))
    assert dx.placements == (Shard(1),)
    assert dw.placements == (Shard(0),)
    replicated = distribute_tensor(call.input, mesh, [Replicate()]).requires_grad_()
    again = vocab_parallel_linear_cross_entropy(replicated, w, call.target, **call.options)
    assert_equal(again, loss)
    (whole_dx,) = torch.autograd.grad(again, replicated)
    assert_equal(whole_dx.to_local(), dx.full_tensor())
    return loss.detach(), [(dx.full_tensor(), dw.full_tensor(), None)]


@SIZES
def test_a_sequence_that_is_sharded_too(ranks: Ranks, rng: torch.Generator) -> None:
    call = plain_call("unit", 33, 16, 101, torch.float32, rng, shift=1)  # 11 positions are no multiple of 2 or 4
    call.input, call.target = call.input.view(3, 11, 16), call.target.view(3, 11)
    out, gradients = ranks(sharded_sequence, call)[0]
    check(call, [(out, gradients)], "xw")


def differentiated_twice(call: Call) -> None:
    x, w, _ = call.leaves("xw")
    mine = own(w, "plain", 0)
    loss = vocab_parallel_linear_cross_entropy(x, mine, call.target, num_classes=len(w))
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dx.sum().backward()


def freed(call: Call) -> None:
    x, w, _ = call.leaves("xw")
    mine = own(w, "plain", 0).detach().clone().requires_grad_()
    loss = vocab_parallel_linear_cross_entropy(x, mine, call.target, num_classes=len(w), reduction="none")
    mine.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="vocab_parallel_linear_cross_entropy: linear_weight must still be there"):
        loss.sum().backward()


def compiled(call: Call) -> None:
    x, w, _ = call.leaves("xw")
    mine, v = own(w, "plain", 0), len(w)

    def double(x: Tensor, mine: Tensor) -> Tensor:
        return 2 * vocab_parallel_linear_cross_entropy(x * 1, mine, call.target, num_classes=v)

    eager = torch.autograd.grad(double(x, mine), (x, mine))
    for a, b in zip(
        torch.autograd.grad(torch.compile(double, backend="eager")(x, mine), (x, mine)), eager, strict=True
    ):
        assert_equal(a, b)
    torch._dynamo.reset()  # it would find the graphs on both sides of the break
    with pytest.raises(torch._dynamo.exc.Unsupported, match="vocab_parallel_linear_cross_entropy"):
        torch.compile(double, backend="eager", fullgraph=True)(x, mine)


def refused(call: Call) -> None:
    x, w, _ = call.leaves("xw")
    mine, ranks, v = own(w, "plain", 0), dist.get_world_size(), len(w)
    mesh = init_device_mesh("cpu", (ranks,))
    square = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("a", "b"))
    sharded = own(w, "dtensor", 0)
    target = call.target
    for error, message, arguments, options in (
        (ValueError, "num_classes must be given", (x, mine, target), {}),
        (ValueError, "linear_weight must have shape .* torch.chunk", (x, w, target), {"num_classes": v}),
        (ValueError, "first_class must leave room", (x, w, target), {"num_classes": v, "first_class": 1}),
        (ValueError, "first_class must be at least 0", (x, mine, target), {"num_classes": v, "first_class": -1}),
        (ValueError, "must be None for a linear_weight that is a DTensor", (x, sharded, target), {"num_classes": 5}),
        (ValueError, r"placements \(Shard\(0\),\)", (x, distribute_tensor(w, mesh, [Shard(1)]), target), {}),
        (ValueError, r"placements \(Shard\(0\),\)", (x, distribute_tensor(w, mesh, [Replicate()]), target), {}),
        (ValueError, "mesh of one dimension", (x, distribute_tensor(w, square, [Shard(0), Replicate()]), target), {}),
        (ValueError, "on the mesh of linear_weight", (distribute_tensor(x, square), sharded, target), {}),
        (TypeError, "input must be a plain tensor", (distribute_tensor(x, mesh), mine, target), {"num_classes": v}),
        (ValueError, r"linear_bias must have shape", (x, mine, target), {"num_classes": v, "linear_bias": w[:, 0]}),
        (ValueError, r"weight must have shape", (x, mine, target), {"num_classes": v, "weight": mine[:, 0]}),
        (ValueError, "linear_weight must have shape", (x[:, 1:], mine, target), {"num_classes": v}),
        (ValueError, "target must have shape", (x, mine, target[1:]), {"num_classes": v}),
        (TypeError, "linear_weight must have the dtype", (x.bfloat16(), mine, target), {"num_classes": v}),
        (ValueError, "chunk_rows must be at least 1", (x, mine, target), {"num_classes": v, "chunk_rows": 0}),
        (IndexError, "expected a class in", (x, mine, target + v), {"num_classes": v}),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            vocab_parallel_linear_cross_entropy(*arguments, **options)


@pytest.mark.parametrize("job", [differentiated_twice, freed, compiled, refused], ids=lambda job: job.__name__)
def test_jobs(job: Any, ranks: Ranks, rng: torch.Generator) -> None:
    ranks(job, plain_call("unit", 9, 8, 21, torch.float32, rng))


def test_no_process_group() -> None:
    x, w = torch.zeros(2, 3), torch.zeros(5, 3)
    with pytest.raises(RuntimeError, match="init_process_group must have been called"):
        vocab_parallel_linear_cross_entropy(x, w, torch.zeros(2, dtype=torch.int64), num_classes=5)


def calls_and_rows(call: Call, chunk_rows: int | None, workspace_bytes: int | None) -> list[int]:
    """The rows of each chunk of logits that was alive."""
    op, seen = torch.ops.syncfree.flce_shard_logits.default, []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            outputs = func(*args, **(kwargs or {}))
            if func is op:
                seen.append(outputs[1].shape[0])
            return outputs

    with Watch():
        score(call, "xw", "uneven", seed=3, chunk_rows=chunk_rows, workspace_bytes=workspace_bytes)
    return seen


def test_chunks(ranks: Ranks, rng: torch.Generator) -> None:
    """Their number does not depend on the size of the rank's own slice."""
    call = plain_call("unit", 100, 4, 50, torch.float32, rng)
    for limits, expected in (
        ((None, None), [100]),
        ((30, None), [30, 30, 30, 10]),
        ((None, 30 * 25 * 4), [25] * 4),  # 25 classes a rank
        ((None, 1), [1] * 100),
    ):
        assert ranks(calls_and_rows, call, *limits) == [expected] * 2


def test_a_failure_is_seen(ranks: Ranks) -> None:
    """Of the tests themselves: an error on a rank reaches the test."""
    with pytest.raises(AssertionError, match=r"(?s)^rank 1 of 2: .*ZeroDivisionError"):
        ranks(divide)


def divide() -> float:
    return 1 / (1 - dist.get_rank())


def example() -> tuple[float, list[float]]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    from tensor_parallel import Task, largest_difference, train

    task, mesh = Task(vocabulary=203, width=16, steps=12), init_device_mesh("cpu", (dist.get_world_size(),))
    spread, whole = train(task, torch.device("cpu"), mesh), train(task, torch.device("cpu"), None)
    return largest_difference(spread, whole), whole


@SIZES
def test_the_example(ranks: Ranks) -> None:
    """Tied embeddings over ranks: the same losses as in one process, step by step, and they fall."""
    for difference, losses in ranks(example):
        assert difference < 1e-4
        assert losses[-1] < 0.9 * losses[0]
