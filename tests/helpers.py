"""What several test files share: one call with its gradients, and memory that shows what was never written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import syncfree_ext
from syncfree_ext import reference
from tolerances import assert_close_rel, assert_equal

# What the refusal of an argument in C++ becomes where no code of this library's stands between the op and the caller.
REFUSED: type[Exception] = ValueError if torch.torch_version.TorchVersion(torch.__version__) < (2, 15) else RuntimeError

EXTRAS = ("z_loss", "token_accuracy", "predicted_tokens", "logsumexp")
ALL_EXTRAS = {f"return_{name}": True for name in EXTRAS}


def loss_and_gradients(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    upstream: Tensor | float = 1.0,
    trainable: str = "xwb",
    **options: Any,
) -> tuple[Any, tuple[Tensor | None, ...]]:
    """What linear_cross_entropy returns, and the gradients of fresh leaves with the values of x, w and bias."""
    leaves = [
        None if t is None else t.detach().requires_grad_(name in trainable)
        for name, t in zip("xwb", (x, w, bias), strict=True)
    ]
    out = syncfree_ext.linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2], **options)
    loss = out if isinstance(out, Tensor) else out.loss
    if loss.requires_grad:
        loss.backward(torch.as_tensor(upstream, dtype=loss.dtype, device=loss.device).expand(loss.shape))
    return out, tuple(None if leaf is None else leaf.grad for leaf in leaves)


@contextmanager
def poisoned_memory(device: torch.device) -> Iterator[None]:
    """New tensors hold NaN (integers: their maximum), so that elements that an op forgets to write are seen.

    torch fills what `empty` returns in deterministic mode. On CUDA the blocks that the caching allocator will hand out
    are filled as well, for memory that does not come through `empty`. Without that allocator, as under
    compute-sanitizer, nothing would be handed out again, and a gigabyte filled for each call.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    if device.type == "cuda" and not os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        blocks = [
            torch.full((size,), torch.nan, device=device) for size in (*[2**27] * 2, *[2**20] * 16, *[2**10] * 64)
        ]
        del blocks
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3, device=device).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def small(
    rng: torch.Generator,
    device: torch.device,
    bt: int = 13,
    h: int = 7,
    v: int = 19,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, target, bias."""
    x, w, b = (torch.randn(*shape, generator=rng).to(device, dtype) for shape in ((bt, h), (v, h), (v,)))
    return x, w, torch.randint(0, v, (bt,), generator=rng).to(device), b


def check(out: Tensor, grads: tuple[Tensor | None, ...], ref: reference.Gradients, tol: float = 1e-5) -> None:
    """Infinite losses must be infinite, everything else close."""
    expected = ref.output.loss
    finite = expected.isfinite()
    assert_equal(out.isfinite(), finite)
    assert_equal(out[~finite].double(), expected[~finite])
    assert_close_rel(out[finite], expected[finite], 1e-6, 1e-7, "loss")
    for name, grad, reference_grad in zip(("dx", "dw", "db"), grads, (ref.dx, ref.dw, ref.db), strict=True):
        if grad is not None:
            assert reference_grad is not None
            assert_close_rel(grad, reference_grad.view(grad.shape), tol, 1e-30, name)


def compare(x: Tensor, w: Tensor, target: Tensor, b: Tensor | None = None, upstream: Any = 1.0, **options: Any) -> Any:
    """Call and reference, checked against each other."""
    out, grads = loss_and_gradients(x, w, target, b, upstream, **options)
    ref = reference.linear_cross_entropy_gradients(x, w, target, linear_bias=b, grad_output=upstream, **options)
    check(out, grads, ref)
    return out, grads
