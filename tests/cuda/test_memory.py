"""Peak memory: the gradients that are asked for, the documented workspace, and nothing else of size V x H or BT x V."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import syncfree_ext

pytestmark = pytest.mark.cuda

MIB = 2**20
BT, H, V = 4096, 512, 65536
WORKSPACE = 32 * MIB  # 128 rows of float32 logits; with SLACK less than the smallest V x H array
SLACK = 20 * MIB  # row statistics, a gathered chunk of rows with its products, alignment
DX, DW = BT * H * 2, V * H * 2  # 4 MiB and 64 MiB in bfloat16
DW32 = V * H * 4


def peak(call: Callable[[], Any]) -> int:
    """Bytes above what is allocated before the call, after warm-up. What the call returns is counted."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


@pytest.fixture
def tensors(rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.randn(BT, H, generator=rng).to("cuda", torch.bfloat16)
    w = torch.randn(V, H, generator=rng).to("cuda", torch.bfloat16) / 16
    target = torch.randint(0, V, (BT,), generator=rng).cuda()
    target[::4] = -100
    return x, w, torch.zeros(V, device="cuda"), target


def step(
    tensors: tuple[Tensor, ...], trainable: str, upstream: float = 1.0, bias: bool = False, **options: Any
) -> Callable[[], Any]:
    leaves = [t.detach().requires_grad_(name in trainable) for name, t in zip("xwb", tensors[:3], strict=True)]
    wanted = [t for t in leaves if t.requires_grad]
    per_row = options.get("reduction") == "none"
    grad_output = torch.full((BT,) if per_row else (), upstream, device="cuda")
    options.setdefault("workspace_bytes", WORKSPACE)

    def run() -> Any:
        loss = syncfree_ext.linear_cross_entropy(
            leaves[0], leaves[1], tensors[3], linear_bias=leaves[2] if bias else None, **options
        )
        return torch.autograd.grad(loss, wanted, grad_output) if wanted else loss

    return run


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("upstream", [1.0, 0.5])
def test_a_frozen_weight_costs_no_buffer_of_its_size(reduction: str, upstream: float, tensors: Any) -> None:
    assert peak(step(tensors, "x", upstream, reduction=reduction)) <= DX + WORKSPACE + SLACK


def test_a_trainable_bias_alone_costs_one_row(tensors: Any) -> None:
    assert peak(step(tensors, "b", bias=True)) <= WORKSPACE + SLACK


def test_without_gradients(tensors: Any) -> None:
    assert peak(step(tensors, "")) <= WORKSPACE + SLACK

    def inference() -> Any:
        with torch.inference_mode():
            return syncfree_ext.linear_cross_entropy(tensors[0], tensors[1], tensors[3], workspace_bytes=WORKSPACE)

    assert peak(inference) <= WORKSPACE + SLACK
    leaves = [t.detach().requires_grad_() for t in tensors[:2]]

    def forward_only() -> Any:
        with torch.no_grad():
            return syncfree_ext.linear_cross_entropy(*leaves, tensors[3], workspace_bytes=WORKSPACE)

    assert peak(forward_only) <= WORKSPACE + SLACK


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("upstream", [1.0, 0.5])
def test_all_gradients(reduction: str, upstream: float, tensors: Any) -> None:
    """A float32 accumulator of dW beside the gradients; scaling by the upstream gradient is in place."""
    assert peak(step(tensors, "xw", upstream, reduction=reduction)) <= DX + DW + DW32 + WORKSPACE + SLACK


@pytest.mark.parametrize("upstream", [1.0, 0.5])
def test_lean_accumulation_has_no_accumulator(upstream: float, tensors: Any) -> None:
    assert peak(step(tensors, "xw", upstream, accum_dtype=torch.bfloat16)) <= DX + DW + WORKSPACE + SLACK


def test_the_logits_never_exist_whole(tensors: Any) -> None:
    """BT x V logits would be 512 MiB in bfloat16."""
    for workspace in (16 * MIB, 64 * MIB, 128 * MIB):
        # A chunk has at least 128 rows, 32 MiB of float32 logits.
        least = max(workspace, 128 * V * 4)
        assert peak(step(tensors, "x", workspace_bytes=workspace)) <= DX + least + SLACK


def test_the_default_does_not_depend_on_free_memory(tensors: Any) -> None:
    default = step(tensors, "xw", workspace_bytes=None)
    alone = peak(default)
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(int(free * 0.7), dtype=torch.uint8, device="cuda")
    # A cached block that is up to 1 MiB larger than needed is handed out whole.
    assert abs(peak(default) - alone) <= 16 * MIB
    del held


def test_nothing_is_kept_after_backward(tensors: Any) -> None:
    run = step(tensors, "xw")
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_scaling_is_in_place(tensors: Any) -> None:
    """Backward of "mean" takes no memory, whatever the upstream gradient."""
    x, w = tensors[0].detach().requires_grad_(), tensors[1].detach().requires_grad_()
    for upstream in (torch.tensor(1.0, device="cuda"), torch.tensor(0.5, device="cuda")):
        for _ in range(2):
            loss = syncfree_ext.linear_cross_entropy(x, w, tensors[3], workspace_bytes=WORKSPACE)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            grads = torch.autograd.grad(loss, [x, w], upstream)
            torch.cuda.synchronize()
            above = torch.cuda.max_memory_allocated() - before
            del grads, loss
        assert above <= MIB


def test_cross_entropy_costs_the_gradient_alone(rng: torch.Generator) -> None:
    rows, v = 2048, 32768
    logits = torch.randn(rows, v, generator=rng).to("cuda", torch.bfloat16).requires_grad_()
    target = torch.randint(0, v, (rows,), generator=rng).cuda()

    def run() -> Any:
        return torch.autograd.grad(syncfree_ext.cross_entropy(logits, target), logits)

    assert peak(run) <= rows * v * 2 + 4 * MIB

    def forward_only() -> Any:
        with torch.no_grad():
            return syncfree_ext.cross_entropy(logits, target)

    assert peak(forward_only) <= 4 * MIB
