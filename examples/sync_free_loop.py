#!/usr/bin/env python3
"""A training loop with seven typical syncs, and the same loop with the first k of them removed.

Stage 0 is the loop as it is often written; stage k is stage k - 1 without one more sync; stage 7 has none left. All
stages compute the same losses, which is checked. docs/training_loops.md goes through them one by one, and its table is
what this script measures:

    python examples/sync_free_loop.py --size small --json docs/training_loops.json    # all stages
    python examples/sync_free_loop.py --step 3                                        # one of them

On a GPU a step takes the time between events on the stream, the median over the steps of several rounds; what follows
it is how often the host waited, as torch's sync debug mode reports it. Beside the training stream a bulk copy to the
host runs in each step, as where weights or states of the optimizer are offloaded, except at size small.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sync_count import counted_syncs
from torch import Tensor, nn

import syncfree_ext as sf

REMOVED = (
    "nothing: the plain loop",
    "batches from ordinary memory",
    "a constant that is uploaded",
    "indexing with a mask",
    "a divisor that is read",
    "statistics of an offloaded module",
    "a check for NaN in each step",
    "loss and metrics read in each step",
)
WARM_UP = 5
# Largest difference of a loss between stages, relative: padded sums add up in another order. SGD lets it grow slowly,
# where Adam would take the sign of a gradient that is nothing but rounding.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Size:
    """Sizes of the model and its batch."""

    layers: int
    width: int
    batch: int
    length: int
    kept: int  # most positions of a sequence that are scored
    offload: int  # MiB that are copied to the host in each step; on a GPU only


SIZES = {
    "tiny": Size(2, 32, 4, 32, 12, 1),
    "small": Size(8, 512, 32, 256, 96, 0),  # 0.04 TFLOP in a step: the host takes longer to queue it
    "large": Size(16, 2048, 16, 512, 192, 1024),  # 1.3 TFLOP: the GPU takes longer to compute it
}


@dataclass
class Stage:
    """What a stage took."""

    step: int
    removed: str
    milliseconds: float
    syncs_per_step: float | None  # None where there is no GPU to wait for


class Offload:
    """A copy to page-locked memory after each step, on a stream of its own.

    The training stream waits for it only before the next step of the optimizer, which would change what is copied.
    """

    def __init__(self, mebibytes: int, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if mebibytes and device.type == "cuda" else None
        if self.stream is not None:
            self.source = torch.zeros(mebibytes << 20, dtype=torch.uint8, device=device)
            self.target = torch.empty(mebibytes << 20, dtype=torch.uint8, pin_memory=True)

    def start(self) -> None:
        """Behind what is on the training stream now."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
            with torch.cuda.stream(self.stream):
                self.target.copy_(self.source, non_blocking=True)

    def finish(self) -> None:
        """What comes on the training stream now runs when the copy is done. The host does not wait."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


class Loop:
    """The loop of one stage: `gone(k)` says whether sync k has been removed."""

    def __init__(self, stage: int, size: Size, device: torch.device, offload: Offload) -> None:
        torch.manual_seed(0)
        self.stage, self.size, self.device, self.offload = stage, size, device, offload
        layers = [nn.Sequential(nn.Linear(size.width, size.width), nn.GELU()) for _ in range(size.layers)]
        self.model = nn.Sequential(*layers, nn.Linear(size.width, size.width)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9, fused=True)
        self.norm = nn.BatchNorm1d(size.width, affine=False)  # of a module that is on the host
        self.norm(torch.randn(64, size.width))
        self.inputs = [torch.randn(size.batch, size.length, size.width) for _ in range(4)]
        self.masks = [torch.rand(size.batch, size.length) < 0.5 for _ in range(4)]
        if self.gone(1) and device.type == "cuda":
            self.inputs = [x.pin_memory() for x in self.inputs]
            self.masks = [m.pin_memory() for m in self.masks]
        if self.gone(5):
            sf.pin_buffers(self.norm, ["running_mean", "running_var"], device)
        self.deviation = sf.ResidentCache(lambda variance, eps: (variance + eps).sqrt(), device)
        self.ring = sf.AsyncScalars(device, ["loss", "grad_norm"], depth=4)
        self.guard = sf.NonFiniteGuard(self.ring)
        self.losses: list[float] = []

    def gone(self, sync: int) -> bool:
        """Whether this sync is removed in this stage."""
        return self.stage >= sync

    def step(self, index: int) -> None:
        """One step of training."""
        x, mask = self.to_device(self.inputs[index % 4]), self.to_device(self.masks[index % 4])
        # 2: `torch.tensor(0.1, device=...)` uploads a number from ordinary memory.
        scale = torch.full((), 0.1, device=x.device) if self.gone(2) else torch.tensor(0.1, device=x.device)
        x = self.normalized(x) * scale
        errors, keep = self.scored(x, mask)
        if self.gone(4):
            # 4: the divisor stays on the device; a batch without positions has loss 0.
            loss = (errors * keep).sum() / keep.sum().clamp(min=1)
        else:
            count = int(keep.sum().item())
            loss = (errors * keep).sum() / max(count, 1)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.offload.finish()
        self.optimizer.step()
        self.offload.start()
        self.optimizer.zero_grad()
        self.look(index, loss, norm)

    def to_device(self, tensor: Tensor) -> Tensor:
        """1: a copy from ordinary memory makes the host wait; from page-locked memory it need not."""
        return tensor.to(self.device, non_blocking=self.gone(1))

    def normalized(self, x: Tensor) -> Tensor:
        """5: the statistics of a module that is on the host, uploaded in each step, or left on the device."""
        mean, variance = self.norm.running_mean, self.norm.running_var
        assert mean is not None
        assert variance is not None
        if self.gone(5):
            return (x - mean) / self.deviation(variance, self.norm.eps)
        return (x - mean.to(x.device)) / (variance + self.norm.eps).sqrt().to(x.device)

    def scored(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """3: errors at the first positions of the mask, and which of them count: cut to size, or padded."""
        if self.gone(3):
            indices, keep, _ = sf.masked_indices(mask, self.size.kept)
            picked = x.gather(1, indices.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
            errors = F.mse_loss(self.model(picked), picked.roll(1, -1), reduction="none").mean(-1)
            return errors, keep
        picked = x[mask & (mask.cumsum(-1) <= self.size.kept)]
        errors = F.mse_loss(self.model(picked), picked.roll(1, -1), reduction="none").mean(-1)
        return errors, torch.ones_like(errors, dtype=torch.bool)

    def look(self, index: int, loss: Tensor, norm: Tensor) -> None:
        """6 and 7: is the loss finite, and what is it?"""
        if self.gone(6):
            self.guard.update(index, loss, norm)
        elif not torch.isfinite(loss):
            raise FloatingPointError(f"the loss of step {index} is not finite")
        if self.gone(7):
            self.ring.put(index, {"loss": loss, "grad_norm": norm})
            self.losses += [values["loss"] for _, values in self.ring.poll()]
        else:
            self.losses.append(loss.item())
            norm.item()

    def run(self, steps: int, first: int) -> list[float]:
        """Milliseconds of each step."""
        marks: list[Any] = []
        for index in range(first, first + steps):
            marks.append(self.mark())
            self.step(index)
        marks.append(self.mark())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [a.elapsed_time(b) for a, b in pairwise(marks)]
        return [(b - a) * 1e3 for a, b in pairwise(marks)]

    def mark(self) -> Any:
        """The boundary between two steps."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> list[float]:
        """All losses."""
        with self.ring:
            self.guard.check()
        self.losses += [values["loss"] for _, values in self.ring.poll()]
        return self.losses


def measure(stages: list[int], size: Size, device: torch.device, steps: int, rounds: int) -> list[Stage]:
    """Times the stages in turn, so that a change of the machine's speed meets them all."""
    offload = Offload(size.offload, device)
    loops = {stage: Loop(stage, size, device, offload) for stage in stages}
    for loop in loops.values():
        loop.run(WARM_UP, 0)
    times: dict[int, list[float]] = {stage: [] for stage in stages}
    done = WARM_UP
    for _ in range(rounds):
        for stage, loop in loops.items():
            times[stage] += loop.run(steps, done)
        done += steps
    results, losses = [], {}
    for stage, loop in loops.items():
        with counted_syncs(device) as syncs:
            for index in range(done, done + steps):
                loop.step(index)
        counted = syncs[0] / steps if device.type == "cuda" else None
        results.append(Stage(stage, REMOVED[stage], statistics.median(times[stage]), counted))
        losses[stage] = loop.finish()
    first = losses[stages[0]]
    for stage, values in losses.items():
        worst = max(abs(a - b) / abs(a) for a, b in zip(first, values, strict=True))
        if worst > TOLERANCE:
            raise SystemExit(f"the losses of stage {stage} differ from those of stage {stages[0]} by {worst:.1e}")
    return results


def main() -> None:
    """Measures, prints the table, writes the numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--step", type=int, choices=range(len(REMOVED)), help="one stage alone (default: all)")
    parser.add_argument("--steps", type=int, default=40, help="training steps of each round (default: 40)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each stage (default: 3)")
    parser.add_argument("--size", choices=SIZES, help="sizes of the model (default: large on a GPU, else tiny)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument("--json", type=Path, help="file for the numbers (default: none)")
    options = parser.parse_args()
    if options.steps < 1 or options.rounds < 1:
        parser.error("--steps and --rounds: expected at least 1")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = options.size or ("large" if device.type == "cuda" else "tiny")
    stages = list(range(len(REMOVED))) if options.step is None else [options.step]
    results = measure(stages, SIZES[size], device, options.steps, options.rounds)
    print("| stage | removed | time of a step | saved | syncs per step |\n|---:|---|---:|---:|---:|")
    before: float | None = None
    for result in results:
        saved = "" if before is None else f"{before - result.milliseconds:.3f}"
        counted = "not applicable" if result.syncs_per_step is None else f"{result.syncs_per_step:.2f}"
        print(f"| {result.step} | {result.removed} | {result.milliseconds:.3f} ms | {saved} | {counted} |")
        before = result.milliseconds
    if len(results) > 1:
        print("every stage computes the same losses")
    if options.json:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
        numbers = {
            "device": where,
            "torch": torch.__version__,
            "size": {"name": size, **asdict(SIZES[size])},
            "steps": options.steps,
            "rounds": options.rounds,
            "stages": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
