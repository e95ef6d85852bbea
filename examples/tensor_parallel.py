#!/usr/bin/env python3
"""Trains a small model whose vocabulary is spread over ranks, and the same model whole, and compares their losses.

Embedding and loss head are tied: one matrix, of which each rank holds some classes. Both models start from the same
numbers and see the same batches, so their losses differ by rounding alone. The vocabulary need not be divisible by the
number of ranks. On the CPU the ranks talk over gloo, on GPUs over NCCL.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py --help
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import syncfree_ext
from syncfree_ext.integrations.distributed import vocab_parallel_linear_cross_entropy

IGNORE = -100


@dataclass(frozen=True)
class Task:
    """Sizes of the model and its batches."""

    vocabulary: int = 1003
    width: int = 64
    batch: int = 8
    length: int = 32
    steps: int = 40


class Model(nn.Module):
    """Tokens to the loss of the next token, through one hidden layer; the first matrix is also the last one."""

    def __init__(self, task: Task, device: torch.device, mesh: DeviceMesh | None) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        weight = (torch.randn(task.vocabulary, task.width, generator=rng) * 0.3).to(device)
        mix = torch.randn(task.width, task.width, generator=rng) / task.width**0.5
        self.mesh = mesh
        self.weight = nn.Parameter(weight if mesh is None else distribute_tensor(weight, mesh, [Shard(0)]))
        self.mix = nn.Parameter(mix.to(device))

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        """The mean loss over the targets that are not ignored."""
        if self.mesh is None:
            hidden = torch.tanh(F.embedding(tokens, self.weight) @ self.mix)
            loss = syncfree_ext.linear_cross_entropy(hidden, self.weight, target, shift=1)
        else:
            # A lookup in sharded rows: each rank finds its own tokens, and the parts are added up.
            found = F.embedding(DTensor.from_local(tokens, self.mesh, [Replicate()]), self.weight)
            assert isinstance(found, DTensor)
            hidden = torch.tanh(found.full_tensor() @ self.mix)
            loss = vocab_parallel_linear_cross_entropy(hidden, self.weight, target, shift=1)
        assert isinstance(loss, Tensor)
        return loss


def batch_of(task: Task, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens that follow a rule with some noise, and targets of which a tenth is ignored; the same on each rank."""
    rng = torch.Generator().manual_seed(step + 1)
    tokens = torch.randint(task.vocabulary, (task.batch, task.length), generator=rng)
    for t in range(1, task.length):
        follows = torch.rand(task.batch, generator=rng) < 0.9
        tokens[:, t] = torch.where(follows, (tokens[:, t - 1] * 7 + 3) % task.vocabulary, tokens[:, t])
    target = tokens.masked_fill(torch.rand(tokens.shape, generator=rng) < 0.1, IGNORE)
    return tokens.to(device), target.to(device)


def train(task: Task, device: torch.device, mesh: DeviceMesh | None) -> list[float]:
    """The loss of each step, read once at the end."""
    model = Model(task, device, mesh)
    # foreach would mix sharded and plain parameters in one call.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(task.steps):
        loss = model(*batch_of(task, step, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    values: list[float] = torch.stack(losses).tolist()
    return values


def largest_difference(a: list[float], b: list[float]) -> float:
    """Relative to the losses."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def main() -> None:
    """Run as one of the ranks that torchrun starts."""
    defaults = Task()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("vocabulary", "width", "batch", "length", "steps"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name), help="default: %(default)s")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="relative; default: %(default)s")
    arguments = vars(parser.parse_args())
    tolerance = arguments.pop("tolerance")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/tensor_parallel.py")
    task = Task(**arguments)

    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    spread, whole = train(task, device, mesh), train(task, device, None)
    difference = largest_difference(spread, whole)
    if dist.get_rank() == 0:
        print(f"{task.vocabulary} classes on {dist.get_world_size()} ranks ({device.type})\n")
        print("step   spread    whole")
        for step in range(0, task.steps, max(1, task.steps // 8)):
            print(f"{step:4}  {spread[step]:7.4f}  {whole[step]:7.4f}")
        print(f"\nlargest difference of the losses, relative: {difference:.1e}")
    dist.destroy_process_group()
    if not difference <= tolerance:
        raise SystemExit(f"the losses differ by {difference:.1e}, more than {tolerance:.1e}")


if __name__ == "__main__":
    main()
