"""The shapes to measure, by name or as BTxHxV."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """BT rows (tokens), H hidden size, V classes."""

    name: str
    BT: int
    H: int
    V: int

    @property
    def flops(self) -> int:
        """Of the three matrix products: logits, dX, dW."""
        return 6 * self.BT * self.H * self.V

    def with_rows(self, rows: int) -> Shape:
        return replace(self, name=f"{self.name}:{rows}", BT=rows)


NAMED = {
    shape.name: shape
    for shape in (
        Shape("llama8b", 8192, 4096, 128256),
        Shape("gemma2b", 8192, 2304, 256000),
        Shape("qwen06b", 16384, 1024, 151936),
        Shape("llama2", 8192, 4096, 32000),
        # Not a power of two: such a divisor would flatter a head that rounds after dividing by it.
        Shape("exact", 6144, 1024, 32000),
        Shape("cpu", 2048, 512, 32000),
        Shape("tiny", 96, 32, 515),
    )
}


def parse_one(text: str) -> Shape:
    """`llama8b`, `llama8b:6144` (the same with 6144 rows) or `4096x1024x32000`.

    Raises:
        ValueError: the text is neither.
    """
    if match := re.fullmatch(r"(\d+)[x×](\d+)[x×](\d+)", text):
        BT, H, V = map(int, match.groups())
        return Shape(f"{BT}x{H}x{V}", BT, H, V)
    name, _, rows = text.partition(":")
    if name in NAMED and (not rows or rows.isdigit()):
        return NAMED[name].with_rows(int(rows)) if rows else NAMED[name]
    raise ValueError(f"bench: a shape must be one of {', '.join(NAMED)}, NAME:ROWS or BTxHxV, got {text!r}")


def parse(text: str) -> list[Shape]:
    """Several of them, separated by commas."""
    return [parse_one(part.strip()) for part in text.split(",") if part.strip()]
