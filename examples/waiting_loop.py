"""A training loop with the usual waits for the GPU, for trying the sync finder.

    syncfree syncs examples/waiting_loop.py
    syncfree syncs examples/waiting_loop.py --without loss,nan

The second command trains with two of the waits replaced by work that the host does not wait for. `--without all` leaves
none. It runs on the CPU too, where nothing waits.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WAITS = ("batch", "scale", "mask", "nan", "norm", "loss")


class Block(nn.Module):
    """A residual block of two products, with many small ops around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) in and out."""
        gate = torch.sigmoid(x.mean(-1, keepdim=True))
        out: Tensor = x + gate * self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, vocab) of tokens (B, T)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def batches(device: torch.device, vocab: int, rows: int, length: int, waits: bool) -> Iterator[Tensor]:
    """Random tokens on the device: from pageable memory, which waits, or from pinned memory, which does not."""
    pool = [torch.randint(vocab, (rows, length)) for _ in range(8)]
    if not waits and device.type == "cuda":
        pool = [tokens.pin_memory() for tokens in pool]
    index = 0
    while True:
        yield pool[index % len(pool)].to(device, non_blocking=not waits)
        index += 1


def train(
    steps: int, without: Collection[str] = (), device: torch.device | None = None, large: bool | None = None
) -> Tensor:
    """Trains for so many steps and returns the sum of the losses, on the device.

    Args:
        steps: optimizer steps.
        without: names from WAITS that are replaced.
        device: the first GPU by default, else the CPU.
        large: of a size for a GPU.

    Raises:
        ValueError: `without` names what is not in WAITS.
    """
    unknown = set(without) - set(WAITS)
    if unknown:
        raise ValueError(f"train: without must be of {', '.join(WAITS)}, got {', '.join(sorted(unknown))}")
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    large = device.type == "cuda" if large is None else large
    vocab, width, layers, rows, length = (16384, 1024, 24, 8, 512) if large else (128, 32, 4, 2, 16)
    torch.manual_seed(0)
    with device:
        model = Model(vocab, width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = batches(device, vocab, rows, length + 1, "batch" not in without)
    total = torch.zeros((), device=device)
    bad = torch.zeros((), device=device)
    scale_on_device = torch.full((), 0.5, device=device)
    for _ in range(steps):
        tokens = next(data)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens[:, :-1]).flatten(0, 1)
        target = tokens[:, 1:].flatten()
        counted = target >= vocab // 10
        losses = F.cross_entropy(logits.float(), target, reduction="none")
        if "mask" in without:
            loss = torch.where(counted, losses, 0).sum() / counted.sum()
        else:
            loss = losses[counted].mean()
        scale = scale_on_device if "scale" in without else torch.tensor(0.5, device=device)
        (loss * scale).backward()
        loss = loss.detach()
        if "nan" in without:
            bad += loss.isnan()
        elif torch.isnan(loss):
            raise FloatingPointError("the loss is NaN")
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if "norm" not in without:
            norm.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss
        if "loss" not in without:
            loss.item()
    return total


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="A training loop with the usual waits for the GPU.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--without", default="", help=f"waits to replace, of {','.join(WAITS)}, or all")
    options = parser.parse_args()
    without = WAITS if options.without == "all" else [name for name in options.without.split(",") if name]
    train(options.steps, without)


if __name__ == "__main__":
    main()
