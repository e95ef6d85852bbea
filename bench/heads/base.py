"""What a head is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Call: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [BT, H], w [V, H], target [BT]) -> the mean loss over the targets that are not -100, 0-D."""

Maker: TypeAlias = Callable[[torch.device, "int | None"], Call]
"""(device, chunk rows or None) -> a call. ImportError means that the package is missing."""


class UnavailableError(Exception):
    """A head cannot run here. The message says why."""


@dataclass(frozen=True)
class Head:
    name: str
    family: str
    call: Call


def no_rows(name: str, rows: int | None) -> None:
    """Refuse a chunk size where there is none to set.

    Raises:
        UnavailableError: rows is set.
    """
    if rows is not None:
        raise UnavailableError(f"{name} takes no number of rows, got {rows}")
