"""What the figures are held against: three full-size matrix products of the library, and the bandwidth of a copy.

The limit of a head is logits [BT, V], dX and dW as three bare products, with nothing fused to them and each output
written once: once on random operands and once on the operands and the true gradient of the batch, because a GPU that is
bound by its power is faster on data with fewer bits that change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .data import IGNORE, Batch
from .device import MIB, Marks
from .timing import Participant, block, stat

RANDOM = "limit"
REAL = "limit-real"


def _true_gradient(batch: Batch) -> Tensor:
    """softmax − onehot of every row, not divided by N, in the dtype of x; [BT, V]."""
    x, w, t = batch.x.detach(), batch.w.detach(), batch.t
    g = torch.empty(batch.shape.BT, batch.shape.V, dtype=x.dtype, device=x.device)
    for start in range(0, batch.shape.BT, 1024):
        tr = t[start : start + 1024]
        p = torch.softmax((x[start : start + 1024] @ w.t()).float(), 1)
        p[torch.arange(len(tr), device=p.device), tr.clamp(min=0)] -= 1
        p[tr == IGNORE] = 0
        g[start : start + 1024] = p.to(g.dtype)
    return g


def three_products(batch: Batch, real: bool) -> Participant:
    """To be timed with the heads. Its parts are logits, dx and dw; its buffers live only while it is timed."""
    shape, dtype, device = batch.shape, batch.x.dtype, batch.x.device
    buffers: list[Tensor] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        if real:
            x, w, g = batch.x.detach(), batch.w.detach(), _true_gradient(batch)
        else:
            draw = torch.Generator(device).manual_seed(3)
            x = torch.randn(shape.BT, shape.H, device=device, dtype=dtype, generator=draw)
            w = torch.randn(shape.V, shape.H, device=device, dtype=dtype, generator=draw) / shape.H**0.5
            g = torch.randn(shape.BT, shape.V, device=device, dtype=dtype, generator=draw)
        buffers[:] = [x, w, g, torch.empty_like(g), torch.empty_like(x), torch.empty_like(w)]
        try:
            yield
        finally:
            buffers.clear()

    @torch.no_grad()
    def step(call: int, mark: Marks) -> None:
        x, w, g, z, dx, dw = buffers
        mark("start")
        torch.mm(x, w.t(), out=z)
        mark("logits")
        torch.mm(g, w, out=dx)
        mark("dx")
        torch.mm(g.t(), x, out=dw)
        mark("dw")

    return Participant(REAL if real else RANDOM, step, around)


def copy_bandwidth(device: torch.device, block_ms: float) -> float:
    """GB/s of a copy within the device's memory, bytes read and bytes written."""
    size = (4096 if device.type == "cuda" else 256) * MIB
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)

    def step(call: int, mark: Marks) -> None:
        mark("start")
        target.copy_(source)
        mark("copy")

    milliseconds = stat([block(step, device, block_ms)["total"]]).median
    return 2 * size / milliseconds / 1e6
