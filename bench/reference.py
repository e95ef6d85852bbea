"""The exact loss and gradients in float64 from the same rounded inputs, and the relative L2 errors against them.

dX = (softmax(X Wᵀ) − onehot) W / N and dW = (softmax(X Wᵀ) − onehot)ᵀ X / N over the N rows that are not ignored, in
blocks of rows. Where float64 is slow and the shape large, only 256 rows of dX and 256 classes of dW are computed; the
logsumexp of the other rows then comes from float32 products, which is exact to about 1e-6. `method` says which.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import IGNORE, Batch

_ROWS = 512
_SAMPLES = 256
# Compute capabilities whose float64 units reach tens of TFLOP/s.
_FAST_FLOAT64 = {(8, 0), (9, 0), (10, 0)}


@dataclass
class Reference:
    """dx is [len(rows), H] and dw [len(classes), H], float64; rows and classes are None where all are there."""

    loss: float
    dx: Tensor
    dw: Tensor
    rows: Tensor | None
    classes: Tensor | None
    method: str


def is_full_affordable(batch: Batch) -> bool:
    if batch.x.device.type == "cuda":
        return torch.cuda.get_device_capability(batch.x.device) in _FAST_FLOAT64 or batch.shape.flops < 2e12
    return batch.shape.flops < 4e11


@torch.no_grad()
def reference(batch: Batch, full: bool | None = None) -> Reference:
    """The exact result, in full or sampled; by default as `is_full_affordable` says."""
    return _full(batch) if (is_full_affordable(batch) if full is None else full) else _sampled(batch)


def _full(batch: Batch) -> Reference:
    x, w, t = batch.x.detach(), batch.w.detach().double(), batch.t
    dx = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    dw = torch.zeros(w.shape, dtype=torch.float64, device=x.device)
    valid = (t != IGNORE).nonzero()[:, 0]
    loss = torch.zeros((), dtype=torch.float64, device=x.device)
    for rows in valid.split(_ROWS):
        xr, tr = x[rows].double(), t[rows]
        logits = xr @ w.t()
        loss += F.cross_entropy(logits, tr, reduction="sum")
        g = torch.softmax(logits, 1)
        g[torch.arange(len(rows), device=x.device), tr] -= 1
        g /= max(len(valid), 1)
        dx[rows] = g @ w
        dw.addmm_(g.t(), xr)
    return Reference(float(loss) / max(len(valid), 1), dx, dw, None, None, "float64, all rows and classes")


def _sampled(batch: Batch) -> Reference:
    x, w, t = batch.x.detach(), batch.w.detach(), batch.t
    device = x.device
    valid = (t != IGNORE).nonzero()[:, 0]
    n = max(len(valid), 1)
    g = torch.Generator(device).manual_seed(7)
    rows = valid[torch.randperm(len(valid), device=device, generator=g)[:_SAMPLES]]
    # Half of the classes are targets: a class that is none has a much smaller gradient, which would not weigh in the
    # norm.
    targets = t[valid][torch.randperm(len(valid), device=device, generator=g)[: _SAMPLES // 2]]
    others = torch.randperm(batch.shape.V, device=device, generator=g)[: _SAMPLES // 2]
    classes = torch.cat([targets, others]).unique()

    lse = torch.zeros(len(valid), dtype=torch.float64, device=device)
    target_logits = torch.zeros_like(lse)
    dw = torch.zeros(len(classes), batch.shape.H, dtype=torch.float64, device=device)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        for start in range(0, len(valid), _ROWS):
            block = valid[start : start + _ROWS]
            xr, tr = x[block], t[block]
            largest = torch.full((len(block),), -torch.inf, dtype=torch.float64, device=device)
            total = torch.zeros_like(largest)
            for columns in w.split(16384):
                logits = (xr.float() @ columns.float().t()).double()
                peak = torch.maximum(largest, logits.amax(1))
                total = total * (largest - peak).exp() + (logits - peak[:, None]).exp().sum(1)
                largest = peak
            lse[start : start + _ROWS] = largest + total.log()
            xd = xr.double()
            target_logits[start : start + _ROWS] = (xd * w[tr].double()).sum(1)
            p = (xd @ w[classes].double().t() - lse[start : start + _ROWS, None]).exp()
            p -= (classes[None] == tr[:, None]).double()
            dw.addmm_(p.t(), xd, alpha=1 / n)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32

    dx = torch.zeros(len(rows), batch.shape.H, dtype=torch.float64, device=device)
    for start in range(0, len(rows), 64):
        block = rows[start : start + 64]
        logits = torch.cat([x[block].double() @ columns.double().t() for columns in w.split(16384)], 1)
        p = torch.softmax(logits, 1)
        p[torch.arange(len(block), device=device), t[block]] -= 1
        for first in range(0, batch.shape.V, 16384):
            dx[start : start + 64] += p[:, first : first + 16384] @ w[first : first + 16384].double()
    dx /= n
    method = (
        f"float64, dX of {len(rows)} rows and dW of {len(classes)} classes (half of them targets), logsumexp in float32"
    )
    return Reference(float((lse - target_logits).sum()) / n, dx, dw, rows, classes, method)


def relative_error(out: Tensor, exact: Tensor) -> float:
    """‖out − exact‖ / ‖exact‖ in blocks of rows; ‖out‖ where the exact result is zero. NaN stays NaN."""
    difference = norm = 0.0
    for a, b in zip(out.split(8192), exact.split(8192), strict=True):
        difference += float((a.double() - b).square().sum())
        norm += float(b.square().sum())
    return float((difference / norm) ** 0.5 if norm > 0 else difference**0.5)


@torch.no_grad()
def errors(ref: Reference, loss: float, dx: Tensor, dw: Tensor) -> dict[str, float]:
    """Relative errors of the loss, dX and dW."""
    return {
        "loss": abs(loss - ref.loss) / max(abs(ref.loss), 1e-12),
        "dx": relative_error(dx if ref.rows is None else dx[ref.rows], ref.dx),
        "dw": relative_error(dw if ref.classes is None else dw[ref.classes], ref.dw),
    }


@torch.no_grad()
def rounding_errors(ref: Reference, dtype: torch.dtype) -> dict[str, float]:
    """What rounding the exact gradients to the dtype costs by itself: no head can do better."""
    return {"loss": 0.0, "dx": relative_error(ref.dx.to(dtype), ref.dx), "dw": relative_error(ref.dw.to(dtype), ref.dw)}
