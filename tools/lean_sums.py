#!/usr/bin/env python3
"""What bfloat16 sums of the weight gradient cost, emulated on a CPU: relative L2 errors of dW against float64.

    python tools/lean_sums.py --data trained_mean --seeds 3

Each chunk's product is made in float32 and rounded to bfloat16 where the Hopper kernels round: the probabilities, the
scaled input, the product, and the sum after each chunk. "in the end" adds the rows of the targets to the last sum, as
the kernels do; "in each chunk" adds them to the chunk's product before any rounding. "largest element" is the part of
the squared error, in the end, that one element of dW has. See docs/kernels.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from bench import data, shapes  # noqa: E402


def rounded(x: Tensor) -> Tensor:
    """To bfloat16, as float32."""
    return x.bfloat16().float()


class Batch:
    """A batch of a data set of the benchmark, its exact dW, and the parts that the kernels add up."""

    def __init__(self, rows: int, hidden: int, classes: int, kind: str, seed: int) -> None:
        drawn = data.make(shapes.Shape("lean", rows, hidden, classes), kind, torch.bfloat16, "cpu", seed=seed)
        self.x, self.target = drawn.x.float(), drawn.t
        own = self.target[:, None]
        p = torch.softmax(self.x @ drawn.w.float().T, 1)
        g = p.scatter_add(1, own, torch.full_like(own, -1.0, dtype=p.dtype))
        self.exact = torch.zeros(classes, hidden, dtype=torch.float64)
        for some in torch.arange(rows).chunk(8):
            self.exact += g[some].double().T @ self.x[some].double() / rows
        self.e = rounded(p.scatter(1, own, 0.0))
        self.g = -self.e.sum(1)  # of the target: so that a row of the gradient sums to 0
        self.scaled = rounded(self.x / rows)

    def targets(self, rows: Tensor) -> Tensor:
        """The share of the targets of some rows."""
        share = torch.zeros_like(self.exact, dtype=torch.float32)
        return share.index_add_(0, self.target[rows], self.g[rows, None] * self.x[rows]) / len(self.x)

    def sums(self, chunks: int) -> tuple[Tensor, Tensor]:
        """The weight gradient with the targets in the end, and with them in each chunk."""
        last = torch.zeros_like(self.exact, dtype=torch.float32)
        each = last.clone()
        every = torch.arange(len(self.x))
        for rows in every.chunk(chunks):
            product = self.e[rows].T @ self.scaled[rows]
            last = rounded(last + rounded(product))
            each = rounded(each + rounded(product + self.targets(rows)))
        return rounded(last + self.targets(every)), each

    def errors(self, chunks: int) -> tuple[float, float, float]:
        """Of both, and the part of the first one's square that its largest element has."""
        last, each = ((found.double() - self.exact).square() for found in self.sums(chunks))
        norm = self.exact.square().sum()
        return float((last.sum() / norm).sqrt()), float((each.sum() / norm).sqrt()), float(last.max() / last.sum())


def main(
    kind: Annotated[str, typer.Option("--data", help=", ".join(data.KINDS))] = "trained_mean",
    rows: int = 6144,
    hidden: int = 512,
    classes: int = 16000,
    chunks: Annotated[str, typer.Option(help="numbers of chunks, with commas between")] = "1,2,4,8,16,32",
    seeds: Annotated[int, typer.Option(help="so many draws")] = 1,
) -> None:
    """Print the errors of some draws."""
    if kind not in data.KINDS:
        raise typer.BadParameter(f"expected one of {', '.join(data.KINDS)}, got {kind!r}", param_hint="--data")
    table = Table("seed", "chunks", "in the end", "in each chunk", "largest element", title=f"{kind}: error of dW")
    for seed in range(1, seeds + 1):
        batch = Batch(rows, hidden, classes, kind, seed)
        for count in map(int, chunks.split(",")):
            last, each, largest = batch.errors(count)
            table.add_row(str(seed), str(count), f"{last:.2e}", f"{each:.2e}", f"{largest:.0%}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
