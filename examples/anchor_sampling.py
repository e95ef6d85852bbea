#!/usr/bin/env python3
"""Trains a small block-diffusion draft model twice: as such loops are often written, and without waiting for the GPU.

A draft model learns to continue a text by a block of tokens at once. Each step picks anchors among the positions that
have a target, at random, and predicts the block behind each; positions of a block weigh the less the further they are
from the anchor, by how sure the model is of those before them. The plain loop asks the GPU how many anchors there are
and cuts the batch to that width, uploads constants, checks a divisor, and reads every metric in every step. The other
one pads the anchors to a fixed number (`masked_indices`), masks what is padding, keeps divisors on the device, and
reads metrics when it logs (`MetricBuffer`). Both draw the same random keys, so they pick the same anchors, and the
padding changes nothing: losses and weights are compared at the end, in float64, where the order of sums hardly shows.

    python examples/anchor_sampling.py --help
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sync_count import counted_syncs, per_step
from torch import Tensor, nn

import syncfree_ext as sf

MASK_TOKEN = 0
# Relative difference of metrics and weights: other shapes sum in another order.
TOLERANCE = 1e-8


@dataclass(frozen=True)
class Setup:
    """Sizes of model and batch."""

    device: torch.device
    steps: int
    log_interval: int
    batch: int = 4
    length: int = 96
    anchors: int = 24
    block: int = 4
    width: int = 48
    vocabulary: int = 64


class Draft(nn.Module):
    """From the anchor's token and the mask tokens behind it, and a summary of what is before, to logits of a block."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.embedding = nn.Embedding(setup.vocabulary, setup.width)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.place = nn.Parameter(0.1 * torch.randn(setup.block, setup.width))
        self.context = nn.Linear(setup.width, setup.width)
        self.mix = nn.Sequential(
            nn.Linear(setup.width, 2 * setup.width), nn.GELU(), nn.Linear(2 * setup.width, setup.width)
        )

    def forward(self, tokens: Tensor, noisy: Tensor, anchors: Tensor) -> Tensor:
        """Tokens [B, L], blocks of noise [B, N, block], anchors [B, N] to logits [B, N, block, V]."""
        embedded = self.embedding(tokens)
        steps = torch.arange(1, tokens.shape[1] + 1, device=tokens.device).view(1, -1, 1)
        before = self.context(embedded.cumsum(1) / steps)
        picked = before.gather(1, anchors.unsqueeze(-1).expand(-1, -1, before.shape[-1]))
        hidden = self.embedding(noisy) + self.place + picked.unsqueeze(2)
        logits: Tensor = F.linear(hidden + self.mix(hidden), self.embedding.weight)
        return logits


def make_batch(setup: Setup, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and loss mask of a step, on the device: a prompt, then what is trained on, in each third step little.

    The mask is made on the host, where `host_count_bound` could count it as well: a device mask is the harder case.
    """
    rng = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(1, setup.vocabulary, (setup.batch, 1), generator=rng)
    stride = torch.randint(1, 4, (setup.batch, 1), generator=rng)
    tokens = 1 + (start + stride * torch.arange(setup.length)) % (setup.vocabulary - 1)
    earliest, latest = (setup.length - 25, setup.length - 10) if step % 3 == 0 else (0, setup.length - 10)
    prompt = torch.randint(earliest, latest, (setup.batch, 1), generator=rng)
    mask = torch.arange(setup.length) >= prompt
    mask[0] &= torch.rand(setup.length, generator=rng) < 0.3
    if setup.device.type == "cuda":
        tokens, mask = tokens.pin_memory(), mask.pin_memory()
    return tokens.to(setup.device, non_blocking=True), mask.to(setup.device, non_blocking=True)


def candidates(mask: Tensor, block: int) -> Tensor:
    """Positions that have a target, and a whole block behind them."""
    valid = mask[:, :-1] & mask[:, 1:]
    valid = F.pad(valid, (0, 1))
    valid[:, mask.shape[1] - block :] = False
    return valid


def confidence_weights(nll: Tensor, keep: Tensor) -> Tensor:
    """Weights [B, N, block]: the detached probability that all tokens before this one in the block are right."""
    confidence = (-nll.detach()).exp()
    before = torch.cat((torch.ones_like(confidence[..., :1]), confidence.cumprod(-1)[..., :-1]), -1)
    return before * keep.unsqueeze(-1)


def block_loss(model: Draft, tokens: Tensor, noisy: Tensor, anchors: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
    """Summed weighted loss, summed weights, right tokens at each place of a block, and anchors that count."""
    block = noisy.shape[-1]
    offsets = torch.arange(1, block + 1, device=tokens.device)
    at = (anchors.unsqueeze(-1) + offsets).clamp(max=tokens.shape[1] - 1)
    target = tokens.gather(1, at.flatten(1)).view(at.shape)
    logits = model(tokens, noisy, anchors)
    nll = F.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="none").view(target.shape)
    weight = confidence_weights(nll, keep)
    right = ((logits.detach().argmax(-1) == target) & keep.unsqueeze(-1)).sum((0, 1))
    return (nll * weight).sum(), weight.sum(), right, keep.sum()


Log = list[dict[str, float]]
Step = Callable[[Draft, torch.optim.Optimizer, int], None]


def plain_steps(setup: Setup, generator: torch.Generator, log: Log) -> Step:
    """The loop that waits: width, constants, divisor and metrics go over the bus in each step."""
    interval: Log = []

    def step(model: Draft, optimizer: torch.optim.Optimizer, index: int) -> None:
        tokens, mask = make_batch(setup, index)
        valid = candidates(mask, setup.block)
        count = valid.sum(-1)
        width = min(setup.anchors, int(count.max().item()))
        if width == 0:
            return
        keys = torch.rand(valid.shape, generator=generator, device=setup.device)
        keys[~valid] = 2.0
        order = keys.argsort(dim=-1, stable=True)[:, :width]
        keep = torch.arange(width, device=setup.device) < count.clamp(max=width).unsqueeze(-1)
        anchors = torch.where(keep, order, torch.tensor(setup.length, device=setup.device)).sort(-1).values
        anchors = torch.where(keep, anchors, torch.tensor(0, device=setup.device))
        noisy = torch.full((*anchors.shape, setup.block), MASK_TOKEN, device=setup.device)
        noisy[..., 0] = tokens.gather(1, anchors)
        loss_sum, weight, right, total = block_loss(model, tokens, noisy, anchors, keep)
        if weight.item() <= 0:
            return
        loss = loss_sum / weight
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        metrics = {"loss": loss.item(), "grad_norm": norm.item(), "anchors": total.item()}
        metrics |= {f"right_{i}": right[i].item() / total.item() for i in range(setup.block)}
        interval.append(metrics)
        if (index + 1) % setup.log_interval == 0:
            totals = [m["anchors"] for m in interval]
            mean = {name: sum(m[name] for m in interval) / len(interval) for name in ("loss", "grad_norm")}
            for name in (f"right_{i}" for i in range(setup.block)):
                mean[name] = sum(m[name] * m["anchors"] for m in interval) / sum(totals)
            log.append({**mean, "anchors": sum(totals)})
            interval.clear()

    return step


def sync_free_steps(setup: Setup, generator: torch.Generator, log: Log) -> Step:
    """The loop that does not: fixed shapes, flags and divisors on the device, metrics read when it logs."""
    metrics = sf.MetricBuffer(setup.device, {"anchors": "sum"}, default="ratio")

    def step(model: Draft, optimizer: torch.optim.Optimizer, index: int) -> None:
        tokens, mask = make_batch(setup, index)
        anchors, keep, _ = sf.masked_indices(
            candidates(mask, setup.block), setup.anchors, order="random", generator=generator
        )
        noisy = torch.full((*anchors.shape, setup.block), MASK_TOKEN, device=setup.device)
        noisy[..., 0] = tokens.gather(1, anchors)
        loss_sum, weight, right, total = block_loss(model, tokens, noisy, anchors, keep)
        # A batch without anchors has loss 0 and gradients 0 and does not count: no rank has to ask, or to leave early.
        # An anchor's first token weighs 1, so the clamp changes no other batch.
        counts = total > 0
        loss = loss_sum / weight.clamp(min=1)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rights = {f"right_{i}": (right[i], total) for i in range(setup.block)}
        metrics.add(loss=(loss, counts), grad_norm=(norm, counts), anchors=total, **rights)
        if (index + 1) % setup.log_interval == 0:
            log.append(metrics.compute())

    return step


def train(setup: Setup, make: Callable[[Setup, torch.Generator, Log], Step]) -> tuple[Draft, Log, str]:
    """The trained model, what was logged, and syncs per step between two logs."""
    torch.manual_seed(0)
    model = Draft(setup).to(setup.device, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    log: Log = []
    step = make(setup, torch.Generator(setup.device).manual_seed(7), log)
    for index in range(setup.log_interval):
        step(model, optimizer, index)
    # The steps between the first two logs, without the second one itself.
    between = range(setup.log_interval, 2 * setup.log_interval - 1)
    with counted_syncs(setup.device) as syncs:
        for index in between:
            step(model, optimizer, index)
    for index in range(between.stop, setup.steps):
        step(model, optimizer, index)
    return model, log, per_step(syncs, len(between), setup.device)


def main() -> None:
    """Trains both ways and compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps of each run (default: 200)")
    parser.add_argument("--log-interval", type=int, default=20, help="steps between two logs (default: 20)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    options = parser.parse_args()
    if options.log_interval < 2 or options.steps < 2 * options.log_interval:
        parser.error("--steps: expected at least twice --log-interval, and that at least 2")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    setup = Setup(device, options.steps, options.log_interval)
    plain, plain_log, plain_syncs = train(setup, plain_steps)
    free, free_log, free_syncs = train(setup, sync_free_steps)

    print(f"{'step':>6}  {'loss':>8}  {'first token right':>17}  {'last token right':>16}  {'anchors':>8}")
    for i, values in enumerate(free_log):
        print(
            f"{(i + 1) * setup.log_interval:>6}  {values['loss']:>8.4f}  {values['right_0']:>17.1%}  "
            f"{values[f'right_{setup.block - 1}']:>16.1%}  {values['anchors']:>8.0f}"
        )
    print(f"syncs per step between two logs: {plain_syncs} before, {free_syncs} after")
    assert len(plain_log) == len(free_log)
    logs = max(
        abs(a[name] - b[name]) / max(1.0, abs(a[name])) for a, b in zip(plain_log, free_log, strict=True) for name in a
    )
    weights = max(
        float((a - b).detach().norm() / a.detach().norm())
        for a, b in zip(plain.parameters(), free.parameters(), strict=True)
    )
    print(f"largest relative difference: metrics {logs:.1e}, weights {weights:.1e}")
    if not (logs < TOLERANCE and weights < TOLERANCE):
        raise SystemExit(f"the two runs differ by more than {TOLERANCE}")
    print("the two runs are equal up to the order of their sums")


if __name__ == "__main__":
    main()
