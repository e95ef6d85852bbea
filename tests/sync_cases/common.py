"""What the cases share. A case marks the lines that must be found: `# FIND: scalar read`, and nothing else may be."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from syncfree_ext.syncs import step

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

_size = 2048 if device.type == "cuda" else 16
_a = torch.full((_size, _size), 1e-3, device=device)
_b = torch.empty_like(_a)


def busy(products: int = 8) -> None:
    """Work for the GPU, so that there is something to wait for.

    A product takes an H200 about 0.3 ms, several times what a slow host takes to queue it under the timer, so that the
    host gets to the wait first. An op whose wait is told by time alone needs more products than eight, to get there
    long before the end. 200 steps of eight are half a second.
    """
    for _ in range(products):
        torch.mm(_a, _a, out=_b)


def steps(default: int = 8) -> Iterator[int]:
    """Steps of a loop without an optimizer."""
    for index in range(int(os.environ.get("SYNC_CASE_STEPS", default))):
        yield index
        step()
