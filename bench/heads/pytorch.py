"""PyTorch's own: the plain pair of functions, the pair compiled, and F.linear_cross_entropy (torch >= 2.13)."""

from __future__ import annotations

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor

from .base import Call, Maker, UnavailableError, no_rows

PACKAGE = "torch"
DEVICES = ("cpu", "cuda")


def _plain_loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), t)


def _float32_softmax_loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), t)


def _plain(device: torch.device, rows: int | None) -> Call:
    no_rows("torch", rows)
    return _plain_loss


def _float32_softmax(device: torch.device, rows: int | None) -> Call:
    no_rows("torch-fp32", rows)
    return _float32_softmax_loss


def _compiled(device: torch.device, rows: int | None) -> Call:
    no_rows("torch-compile", rows)
    # Each shape counts as a recompilation of the same code; past a limit of eight torch would quietly run it
    # uncompiled.
    torch._dynamo.reset()
    # Processes that compile may not end when told to at exit, beside those of other heads: a finished run was held by
    # them until it was killed, after half a minute.
    torch._inductor.config.compile_threads = 1
    compiled: Call = torch.compile(_float32_softmax_loss, dynamic=False)
    return compiled


def _linear_cross_entropy(device: torch.device, rows: int | None) -> Call:
    if not hasattr(F, "linear_cross_entropy"):
        raise UnavailableError(
            f"torch.nn.functional.linear_cross_entropy needs torch 2.13 or newer, got {torch.__version__}"
        )
    from torch.nn import LinearCrossEntropyOptions

    options = LinearCrossEntropyOptions(batch_chunk_size=rows)

    def call(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.linear_cross_entropy(x, w, t, options=options)

    return call


HEADS: dict[str, Maker] = {
    "torch": _plain,
    "torch-fp32": _float32_softmax,
    "torch-compile": _compiled,
    "torch-lce": _linear_cross_entropy,
}
