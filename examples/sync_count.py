"""How often the host waits for the GPU, for the examples' tables."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def counted_syncs(device: torch.device) -> Iterator[list[int]]:
    """Counts the operations that make the host wait for the GPU, as torch's sync debug mode reports them.

    The list that it yields holds the number once the block is left. There is nothing to count on the CPU.
    """
    count = [0]
    if device.type != "cuda":
        yield count
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield count
        finally:
            torch.cuda.set_sync_debug_mode("default")
            count[0] = sum("called a synchronizing" in str(entry.message) for entry in caught)


def per_step(syncs: list[int], steps: int, device: torch.device) -> str:
    """The number for a table."""
    return f"{syncs[0] / steps:.2f}" if device.type == "cuda" else "not applicable"
