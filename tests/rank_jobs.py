"""What the ranks of the tests of vocab_parallel_linear_cross_entropy run: one call on a slice, with its gradients."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cases import Call
from syncfree_ext.integrations.distributed import vocab_parallel_linear_cross_entropy


def cuts(kind: str, classes: int, ranks: int, seed: int) -> list[int]:
    """Where the slices of the ranks begin, and the end of the last."""
    if kind == "uneven":
        return [0, *sorted(random.Random(seed).choices(range(classes + 1), k=ranks - 1)), classes]
    size = -(-classes // ranks)
    return [min(i * size, classes) for i in range(ranks + 1)]


def own(tensor: Tensor | None, kind: str, seed: int) -> Tensor | None:
    """This rank's slice of the classes, as a leaf that requires grad if the whole does."""
    if tensor is None:
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    if kind == "dtensor":
        mesh = init_device_mesh(tensor.device.type, (size,))
        return distribute_tensor(tensor.detach(), mesh, [Shard(0)]).requires_grad_(tensor.requires_grad)
    at = cuts(kind, len(tensor), size, seed)
    return tensor.detach()[at[rank] : at[rank + 1]].requires_grad_(tensor.requires_grad)


def plain(tensor: Tensor | None) -> Tensor | None:
    """What is sent back: on the CPU, without its autograd graph or mesh."""
    if tensor is None:
        return None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def score(
    call: Call, trainable: str, kind: str = "plain", seed: int = 0, backwards: int = 1, device: str = "cpu", **more: Any
) -> tuple[Any, list[tuple[Tensor | None, ...]]]:
    """The output, and the gradients of x, w and b of each backward."""

    def here(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    x, w, b = call.leaves(trainable)
    x = here(x.detach()).requires_grad_(x.requires_grad)
    w, b = (None if t is None else here(t.detach()).requires_grad_(t.requires_grad) for t in (w, b))
    assert w is not None
    classes = len(w)
    own_w, own_b = own(w, kind, seed), own(b, kind, seed)
    options = {name: here(value) for name, value in (call.options | more).items()}
    if kind != "dtensor":
        options["num_classes"] = classes
    if kind == "uneven":
        options["first_class"] = cuts(kind, classes, dist.get_world_size(), seed)[dist.get_rank()]
    out = vocab_parallel_linear_cross_entropy(x, own_w, here(call.target), linear_bias=own_b, **options)
    loss = out if isinstance(out, Tensor) else out.loss
    gradients = []
    leaves = [t for t in (x, own_w, own_b) if t is not None and t.requires_grad]
    for i in range(backwards if loss.requires_grad else 1):
        found = iter(())
        if loss.requires_grad:
            found = iter(torch.autograd.grad(loss, leaves, here(call.upstream), retain_graph=i + 1 < backwards))
        gradients.append(
            tuple(plain(next(found)) if t is not None and t.requires_grad else None for t in (x, own_w, own_b))
        )
    return (plain(out) if isinstance(out, Tensor) else type(out)(*map(plain, out))), gradients
