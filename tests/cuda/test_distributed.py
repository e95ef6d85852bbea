"""The distributed head on two GPUs over NCCL: the values, and that nothing waits for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cases import Call, build, case_id
from helpers import ALL_EXTRAS
from rank_jobs import own, score
from ranks import Ranks
from syncfree_ext.integrations.distributed import (
    global_num_items,
    shift_sequence,
    vocab_parallel_linear_cross_entropy,
)
from test_data_parallel import ddp_gradients, fsdp_gradients, whole_batch_gradients
from test_values import PLAIN_ARRAY, reference_of
from test_vocab_parallel import ARRAY, check, joined, plain_call, seed_of
from tolerances import PRECISION, assert_close_rel, assert_equal

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture
def gpus(rank_pools: Callable[[int, str], Ranks]) -> Ranks:
    return rank_pools(2, "nccl")


@pytest.mark.parametrize("case", ARRAY, ids=[f"{i:02}-{case_id(case)}" for i, case in enumerate(ARRAY)])
def test_options(case: dict[str, Any], gpus: Ranks, rng: torch.Generator) -> None:
    case = case | ({"dtype": "float32"} if case["dtype"] == "float64" else {})
    call = build(case, rng)
    trainable = case["trainable"] if call.linear_bias is not None else case["trainable"].replace("b", "")
    more = {"chunk_rows": case["chunk_rows"], **ALL_EXTRAS}
    check(call, gpus(score, call, trainable, case["slices"], seed_of(rng), device="cuda", **more), trainable)


@pytest.mark.parametrize("kind", ["unit", "confident"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_precision(kind: str, dtype: torch.dtype, gpus: Ranks, rng: torch.Generator) -> None:
    """What docs/semantics.md promises of one device, over several chunks."""
    call = plain_call(kind, 1536, 512, 16001, dtype, rng)
    ref = reference_of(call)
    out, [(dx, dw, _)] = joined(gpus(score, call, "xw", device="cuda", chunk_rows=512))
    promised = PRECISION[dtype, kind]
    scale = max(1.0, ref.logit_max / 32) if dtype == torch.float32 else 1.0
    assert_close_rel(out, ref.output.loss, promised["loss"], 1e-7, "loss")
    assert_close_rel(dx, ref.dx, promised["dx"] * scale, what="dx")
    assert_close_rel(dw, ref.dw, promised["dw"] * scale, what="dw")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_backward(reduction: str, gpus: Ranks, rng: torch.Generator) -> None:
    call = plain_call("unit", 300, 64, 1001, torch.bfloat16, rng, reduction=reduction)
    call.upstream = torch.randn(300, generator=rng) if reduction == "none" else torch.tensor(4.0)
    check(call, gpus(score, call, "xw", backwards=2, chunk_rows=128, device="cuda"), "xw")


def test_bitwise_repeatable(gpus: Ranks, rng: torch.Generator) -> None:
    call = plain_call("unit", 1000, 64, 2001, torch.bfloat16, rng, label_smoothing=0.1, z_loss_weight=1e-3)
    first = joined(gpus(score, call, "xw", chunk_rows=256, device="cuda", **ALL_EXTRAS))
    for _ in range(3):
        again = joined(gpus(score, call, "xw", chunk_rows=256, device="cuda", **ALL_EXTRAS))
        for a, b in zip((*first[0], *first[1][0][:2]), (*again[0], *again[1][0][:2]), strict=True):
            assert_equal(a, b)


SLICES = ("plain", "dtensor", "uneven")


@pytest.mark.parametrize("case", PLAIN_ARRAY, ids=[f"{i:02}-{case_id(case)}" for i, case in enumerate(PLAIN_ARRAY)])
def test_plain_options(case: dict[str, Any], gpus: Ranks, rng: torch.Generator) -> None:
    """bfloat16 with options that are scalars of a row: the Hopper path, where there is one."""
    call = build(case, rng)
    kind = SLICES[case["h"] % 3] if case["v"] > 2 else "uneven"
    answers = gpus(score, call, "xw", kind, seed_of(rng), device="cuda", chunk_rows=case["chunk_rows"], **ALL_EXTRAS)
    check(call, answers, "xw")


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("ignored", [0.0, 0.5, 0.95, 1.0])
def test_ignored_rows(ignored: float, lean: bool, gpus: Ranks, rng: torch.Generator) -> None:
    """The rest is as without them, and the same bits every time."""
    call = plain_call("unit", 2000, 256, 4096, torch.bfloat16, rng, z_loss_weight=1e-3)
    call.target[torch.rand(2000, generator=rng) < ignored] = -100
    more: dict[str, Any] = {"chunk_rows": 512, "accum_dtype": torch.bfloat16 if lean else None, **ALL_EXTRAS}
    answers = gpus(score, call, "xw", device="cuda", **more)
    if not lean:
        check(call, answers, "xw")
    out, [(dx, dw, _)] = joined(answers)
    assert not dx[call.target == -100].any()
    assert dw.any() == (ignored < 1)
    for _ in range(2):
        again, [(dx_again, dw_again, _)] = joined(gpus(score, call, "xw", device="cuda", **more))
        for a, b in zip((*out, dx, dw), (*again, dx_again, dw_again), strict=True):
            assert_equal(a, b)


def peak_of_a_step(call: Call, chunk_rows: int) -> tuple[int, bool]:
    """Bytes above the leaves, and whether the Hopper path took the call."""
    x = call.input.cuda().requires_grad_()
    w = own(call.linear_weight.requires_grad_(), "plain", 0).detach().cuda().requires_grad_()
    target = call.target.cuda()

    def step() -> tuple[Tensor, ...]:
        loss = vocab_parallel_linear_cross_entropy(
            x, w, target, num_classes=len(call.linear_weight), chunk_rows=chunk_rows
        )
        return torch.autograd.grad(loss, (x, w))

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = step()
    torch.cuda.synchronize()
    del gradients
    return torch.cuda.max_memory_allocated() - before, torch.cuda.get_device_capability() == (9, 0)


def test_memory(gpus: Ranks, rng: torch.Generator) -> None:
    """The gradients, dW's low bytes, a chunk of E, and what has a row's size."""
    bt, h, v, chunk, mib = 4096, 512, 65536, 512, 2**20
    call = plain_call("unit", bt, h, v, torch.bfloat16, rng)
    for peak, fused in gpus(peak_of_a_step, call, chunk):
        gradients, e = bt * h * 2 + v // 2 * h * 2, chunk * v // 2 * 2
        low, general = v // 2 * h, 2 * e + v // 2 * h * 4
        assert peak <= gradients + (e + low if fused else general) + 10 * mib


def test_a_target_out_of_range(gpus: Ranks, rng: torch.Generator) -> None:
    """NaN where it is, on each rank, and nowhere else."""
    call = plain_call("unit", 40, 16, 101, torch.float32, rng, reduction="none")
    call.target[7], call.target[20] = 101, -3
    call.upstream = torch.ones(40)
    out, [(dx, _, _)] = joined(gpus(score, call, "x", device="cuda"))
    bad = torch.zeros(40, dtype=torch.bool)
    bad[[7, 20]] = True
    assert_equal(out.isnan(), bad)
    assert_equal(dx.isnan().all(1), bad)
    assert_equal(dx.isnan().any(1), bad)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "extras": ALL_EXTRAS,
    "chunks": {"chunk_rows": 128},
    "everything": {
        **ALL_EXTRAS,
        "weight": torch.rand(1001) + 0.5,
        "token_weight": torch.rand(4, 150),
        "label_smoothing": 0.1,
        "softcap": 15.0,
        "token_scaling": True,
        "logit_scale": 0.9,
        "z_loss_weight": 1e-3,
        "shift": 1,
        "chunk_rows": 128,
    },
}


def step_without_waiting(call: Call, dtype: torch.dtype, kind: str) -> bool:
    """Whether a kernel of a second still runs once a step behind it is queued, under the sync checker.

    The step: the divisor and the shift over ranks, forward, and two backwards, of which the second recomputes.
    """
    options = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in call.options.items()}
    x = call.input.to("cuda", dtype).requires_grad_()
    whole = call.linear_weight.to("cuda", dtype).requires_grad_()
    w, target = own(whole, kind, 0), call.target.cuda()
    upstream = torch.ones(target.shape, device="cuda")
    if kind != "dtensor":
        options["num_classes"] = len(whole)

    def step() -> None:
        mean = {} if options["reduction"] != "mean" else {"num_items": global_num_items(target, len(whole), shift=1)}
        shift_sequence(target, 1, fill=-100)
        out = vocab_parallel_linear_cross_entropy(x, w, target, **options, **mean)
        loss = out if isinstance(out, Tensor) else out.loss
        for retain in (True, False):
            torch.autograd.grad(loss, (x, w), upstream if loss.dim() else upstream[0, 0], retain_graph=retain)

    step()
    step()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        running = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return running


@pytest.mark.parametrize("kind", ["plain", "dtensor"])
@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_waits(name: str, kind: str, gpus: Ranks, rng: torch.Generator) -> None:
    call = plain_call("unit", 600, 64, 1001, torch.float32, rng, **OPTIONS[name])
    call.input, call.target = call.input.view(4, 150, 64), call.target.view(4, 150)
    call.target[:, ::7] = -100
    for running in gpus(step_without_waiting, call, torch.bfloat16, kind):
        assert running, "the host waited for the kernel before it"


@pytest.mark.parametrize("tied", [False, True])
def test_ddp(tied: bool, gpus: Ranks, rng: torch.Generator) -> None:
    seed = seed_of(rng)
    expected = whole_batch_gradients(seed, 2, tied, 3)
    for gradients in gpus(ddp_gradients, seed, tied, 3, "cuda"):
        for name, gradient in gradients.items():
            assert_close_rel(gradient, expected[name], 1e-5, what=name)


@pytest.mark.parametrize(
    ("how", "tied"), [("default", False), ("not in backward", False), ("kept", False), ("default", True)]
)
def test_fsdp2(how: str, tied: bool, gpus: Ranks, rng: torch.Generator) -> None:
    seed = seed_of(rng)
    expected = whole_batch_gradients(seed, 2, tied)
    for gradients, counts in gpus(fsdp_gradients, seed, tied, how, "cuda"):
        for name, gradient in gradients.items():
            assert_close_rel(gradient, expected[name], 1e-5, what=name)
        if not tied:
            assert counts == [2, 1 if how == "default" else 0]
