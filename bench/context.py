"""What a routine is given: what to measure, on what, until when, and where the results go."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import shapes as _shapes
from .results import Record, Store
from .shapes import Shape

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def parse_dtype(text: str) -> torch.dtype:
    """By name or by its short form.

    Raises:
        ValueError: another name.
    """
    name = _SHORT.get(text, text)
    if name not in DTYPES:
        raise ValueError(f"bench: dtype must be one of {', '.join([*DTYPES, *_SHORT])}, got {text!r}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class Context:
    """Everything left None takes the default of the routine."""

    device: torch.device
    store: Store
    shapes: list[Shape] | None = None
    heads: list[str] | None = None
    data: list[str] | None = None
    dtypes: list[torch.dtype] | None = None
    rounds: int = 5
    block_ms: float = 300.0
    deadline: float = float("inf")
    echo: Callable[[str], None] = print
    ended: bool = field(default=False, init=False)

    def with_shapes(self, *names: str) -> list[Shape]:
        return self.shapes if self.shapes is not None else [_shapes.parse_one(name) for name in names]

    def with_data(self, *kinds: str) -> list[str]:
        return self.data if self.data is not None else list(kinds)

    def with_dtypes(self, *dtypes: torch.dtype) -> list[torch.dtype]:
        return self.dtypes if self.dtypes is not None else list(dtypes)

    def is_over(self) -> bool:
        """Whether the time is up; says so once. What is left then is done by the next run."""
        if time.monotonic() < self.deadline:
            return False
        if not self.ended:
            self.echo("time limit reached: run the same command again to go on where this one stopped")
        self.ended = True
        return True

    def todo(self, names: Sequence[str], **identity: Any) -> list[str]:
        """The heads of `names` for which the store has no record yet."""
        return [name for name in names if not self.store.has(head=name, **identity)]

    def add(self, status: str, reason: str | None = None, **fields: Any) -> Record:
        """Store a record and say in a line what came out."""
        record: Record = {"status": status, **({"reason": reason} if reason else {}), **fields}
        self.store.add(record)
        return record


def identity(routine: str, shape: Shape, dtype: torch.dtype, data: str, ignored: float, variant: str = "") -> Record:
    """The key of a record but for the head, and the sizes."""
    return {
        "routine": routine,
        "shape": shape.name,
        "dtype": dtype_name(dtype),
        "data": data,
        "ignored": ignored,
        "variant": variant,
    }


def sizes(shape: Shape) -> Record:
    return {"BT": shape.BT, "H": shape.H, "V": shape.V}
