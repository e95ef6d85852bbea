"""The data sets. All are drawn from a fixed seed in float32 and rounded to the dtype once.

unit          random: logits of root mean square 1, as at the start of training.
confident     the target and a few rivals stand out and every logit rides on a common offset: logits of root mean square
              10 and maximum 30, loss 0.01. Heads that store bfloat16 logits lose three percent of the gradient here.
trained       a unigram (Zipf) prior and 32 context candidates for each token: the softmax of a trained language model.
trained_mean  the same, and all rows of W share a mean row: whatever the rounded gradient of a row fails to sum to zero
              by is multiplied by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .shapes import Shape

IGNORE = -100
Draw = Callable[[Shape, torch.device, torch.Generator], tuple[Tensor, Tensor, Tensor]]


@dataclass
class Batch:
    """x [BT, H], w [V, H], t [BT] int64, and where they came from."""

    x: Tensor
    w: Tensor
    t: Tensor
    shape: Shape
    kind: str
    ignored: float

    @property
    def nbytes(self) -> int:
        return sum(a.numel() * a.element_size() for a in (self.x, self.w, self.t))

    def clone(self) -> Batch:
        return Batch(self.x.clone(), self.w.clone(), self.t.clone(), self.shape, self.kind, self.ignored)

    def require_grad(self) -> Batch:
        self.x.requires_grad_()
        self.w.requires_grad_()
        return self

    def drop_grad(self) -> None:
        self.x.grad = self.w.grad = None


def _unit(shape: Shape, device: torch.device, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(shape.BT, shape.H, device=device, generator=g)
    w = torch.randn(shape.V, shape.H, device=device, generator=g) / shape.H**0.5
    return x, w, torch.randint(0, shape.V, (shape.BT,), device=device, generator=g)


def _confident(shape: Shape, device: torch.device, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    _, w, t = _unit(shape, device, g)
    x = torch.randn(shape.BT, shape.H, device=device, generator=g) + 16.0 * w[t]
    w[:, 0] += 2.0
    x[:, 0] = 5.0
    return x, w, t


def _trained(shape: Shape, device: torch.device, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    candidates = 32
    w = torch.randn(shape.V, shape.H, device=device, generator=g) / shape.H**0.5
    rank = torch.randperm(shape.V, device=device, generator=g).float() + 1
    w[:, 0] = -rank.log() / 8
    drawn = torch.multinomial(1 / rank, shape.BT * candidates, replacement=True, generator=g).view(shape.BT, candidates)
    decay = torch.pow(0.93, torch.arange(candidates, device=device))[None]
    strength = 11.0 * torch.rand(shape.BT, 1, device=device, generator=g) * decay
    x = torch.zeros(shape.BT, shape.H, device=device)
    for k in range(candidates):
        x += (strength[:, k : k + 1] * 0.75) * w[drawn[:, k]]
    x[:, 0] = 8.0
    pick = torch.multinomial(torch.softmax(strength, 1), 1, generator=g)
    return x, w, drawn.gather(1, pick)[:, 0]


def _trained_mean(shape: Shape, device: torch.device, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    x, w, t = _trained(shape, device, g)
    # Orthogonal to the constant first column of x, so that the distribution stays what it is up to a shift of each row.
    mean = torch.randn(shape.H, device=device, generator=g) * (2.0 / shape.H**0.5)
    mean[0] = 0.0
    return x, w + mean, t


KINDS: dict[str, Draw] = {
    "unit": _unit,
    "confident": _confident,
    "trained": _trained,
    "trained_mean": _trained_mean,
}


def make(
    shape: Shape,
    kind: str = "unit",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    ignored: float = 0.0,
    seed: int = 1,
) -> Batch:
    """Draw a batch; `ignored` is the share of rows whose target is IGNORE, chosen at random.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"bench: data must be one of {', '.join(KINDS)}, got {kind!r}")
    device = torch.device(device)
    g = torch.Generator(device).manual_seed(seed)
    x, w, t = KINDS[kind](shape, device, g)
    if ignored > 0:
        t[torch.rand(shape.BT, device=device, generator=g) < ignored] = IGNORE
    return Batch(x.to(dtype), w.to(dtype), t, shape, kind, ignored)


def rotation(batch: Batch, cache_bytes: int) -> list[Batch]:
    """Copies of the batch to go round in, so that none is in the cache when its turn comes; at most 64."""
    copies = min(64, max(1, -(-cache_bytes // max(batch.nbytes, 1))))
    return [batch, *(batch.clone() for _ in range(copies - 1))]
