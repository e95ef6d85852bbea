"""The naive versions of the loop's parts: plain PyTorch and plain Python, with as many syncs as it takes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MASK32 = 2**32 - 1


def masked_indices(
    mask: Tensor, size: int, keys: Tensor | None = None, limit: Tensor | int | None = None, fill_value: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """A row at a time; the smallest keys by a stable sort."""
    rows = mask.reshape(math.prod(mask.shape[:-1]), mask.shape[-1])
    limits = torch.as_tensor(size if limit is None else limit).expand(mask.shape[:-1]).reshape(-1).tolist()
    indices = torch.full((len(rows), size), fill_value, dtype=torch.int64)
    valid = torch.zeros(len(rows), size, dtype=torch.bool)
    flat_keys = None if keys is None else keys.reshape(rows.shape).cpu()
    for r, row in enumerate(rows.cpu()):
        positions = row.nonzero().flatten()
        kept = max(0, min(len(positions), size, limits[r]))
        if flat_keys is not None:
            positions = positions[flat_keys[r][positions].argsort(stable=True)]
        indices[r, :kept] = positions[:kept].sort().values
        valid[r, :kept] = True
    shape = (*mask.shape[:-1], size)
    return (
        indices.view(shape).to(mask.device),
        valid.view(shape).to(mask.device),
        mask.sum(-1),
    )


def philox(seed: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10, from the paper."""
    k0, k1 = seed & MASK32, seed >> 32 & MASK32
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def philox_keys(seed: int, row_ids: list[int], length: int) -> Tensor:
    """float64 [rows, length], which holds 32 bits exactly."""
    return torch.tensor(
        [
            [
                philox(seed, (p // 4 & MASK32, row & MASK32, row >> 32 & MASK32, p // 4 >> 32))[p % 4]
                for p in range(length)
            ]
            for row in row_ids
        ],
        dtype=torch.float64,
    ).view(len(row_ids), length)
