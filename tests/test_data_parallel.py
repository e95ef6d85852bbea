"""DDP, FSDP2 and sequences cut over ranks: gradients of the whole batch, however unevenly its targets lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import syncfree_ext as sf
from ranks import Ranks
from syncfree_ext.integrations.distributed import (
    global_num_items,
    shift_sequence,
    vocab_parallel_linear_cross_entropy,
)
from tolerances import assert_close_rel, assert_equal

V, H, B, T = 37, 12, 4, 9

SIZES = pytest.mark.parametrize("ranks", [2, 4], indirect=True, ids=["2 ranks", "4 ranks"])


class Model(nn.Module):
    """Tokens to the loss of the next ones."""

    def __init__(self, tied: bool, **loss: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.mix = nn.Linear(H, H)
        self.head = sf.LinearCrossEntropyHead(H, V, loss=sf.FusedLinearCrossEntropyLoss(shift=1, **loss))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, target: Tensor, num_items: Tensor | None = None) -> Any:
        return self.head(torch.tanh(self.mix(self.embedding(tokens))), target, num_items=num_items)


def model_of(seed: int, tied: bool, **loss: Any) -> Model:
    torch.manual_seed(seed)
    return Model(tied, **loss)


def batches(seed: int, ranks: int, steps: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    """Tokens and targets of each step and rank: rank 0 has few targets, others more, one micro-batch has none."""
    rng = torch.Generator().manual_seed(seed)
    out = []
    for step in range(steps):
        out.append([])
        for rank in range(ranks):
            tokens = torch.randint(V, (B, T), generator=rng)
            ignored = torch.rand(B, T, generator=rng) > (rank + 1) / (ranks + 1)
            target = tokens.masked_fill(ignored | torch.tensor(step == 1 and rank == 0), -100)
            out[-1].append((tokens, target))
    return out


def whole_batch_gradients(seed: int, ranks: int, tied: bool, steps: int = 1) -> dict[str, Tensor]:
    """Of the mean over all tokens, in one process."""
    model = model_of(seed, tied)
    pairs = [pair for step in batches(seed, ranks, steps) for pair in step]
    model(torch.cat([tokens for tokens, _ in pairs]), torch.cat([target for _, target in pairs])).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def ddp_gradients(seed: int, tied: bool, steps: int, device: str = "cpu") -> dict[str, Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(model_of(seed, tied).to(device))
    mine = [tuple(t.to(device) for t in step[rank]) for step in batches(seed, ranks, steps)]
    num_items = global_num_items([target for _, target in mine], V, shift=1)
    for i, (tokens, target) in enumerate(mine):
        if i + 1 < len(mine):
            with model.no_sync():
                model(tokens, target, num_items).backward()
        else:
            model(tokens, target, num_items).backward()
    return {name: p.grad.cpu() for name, p in model.module.named_parameters()}


@SIZES
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_ddp(tied: bool, steps: int, ranks: Ranks, rng: torch.Generator) -> None:
    seed = int(torch.randint(2**31, (), generator=rng))
    expected = whole_batch_gradients(seed, ranks.size, tied, steps)
    for gradients in ranks(ddp_gradients, seed, tied, steps):
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert_close_rel(gradient, expected[name], 1e-5, what=name)


class CollectiveCounter(TorchDispatchMode):
    """Counts the all-gathers that run while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.gathers += func.name().startswith("c10d::") and "allgather" in func.name()
        return func(*args, **(kwargs or {}))


def fsdp_gradients(seed: int, tied: bool, how: str, device: str = "cpu") -> tuple[dict[str, Tensor], list[int]]:
    """Gradients, and the all-gathers of forward and of backward that the head's own group makes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device, (ranks,))
    model = model_of(seed, tied).to(device)
    if tied:
        fully_shard(model, mesh=mesh)  # one group, as both modules own the parameter
    else:
        fully_shard(model.head, mesh=mesh, reshard_after_forward=how != "kept")
        if how == "not in backward":
            model.head.set_unshard_in_backward(False)
        # The rest stays whole, so that what is counted is the head's.
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    ((tokens, target),) = [[t.to(device) for t in step[rank]] for step in batches(seed, ranks)]
    num_items = global_num_items(target, V, shift=1)
    counts = []
    with CollectiveCounter() as counter:
        loss = model(tokens, target, num_items)
    counts.append(counter.gathers)
    with CollectiveCounter() as counter:
        loss.backward()
    counts.append(counter.gathers)
    gradients = {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters()}
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return gradients, counts


@SIZES
@pytest.mark.parametrize(
    ("how", "tied"), [("default", False), ("not in backward", False), ("kept", False), ("default", True)]
)
def test_fsdp2(how: str, tied: bool, ranks: Ranks, rng: torch.Generator) -> None:
    """37 classes do not divide evenly. One gather of the root and one of the head are what a step needs."""
    seed = int(torch.randint(2**31, (), generator=rng))
    expected = whole_batch_gradients(seed, ranks.size, tied)
    for gradients, counts in ranks(fsdp_gradients, seed, tied, how):
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert_close_rel(gradient, expected[name], 1e-5, what=name)
        if not tied:
            assert counts == [2, 1 if how == "default" else 0]


def gradients_on_a_square(seed: int) -> dict[str, Tensor]:
    """2 x 2 ranks: data-parallel by FSDP2, and each head spread over the other two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "vocabulary"))
    model = model_of(seed, False)
    spread = distribute_tensor(model.head.weight.detach(), mesh["vocabulary"], [Shard(0)])
    model.head.weight = nn.Parameter(spread)

    def forward(input: Tensor, target: Tensor, num_items: Tensor) -> Any:
        return vocab_parallel_linear_cross_entropy(
            input, model.head.weight, target, shift=1, num_items=num_items, chunk_rows=7
        )

    model.head.forward = forward
    for module in (model.head, model):
        fully_shard(module, mesh=mesh["data"])
    model.head.set_unshard_in_backward(False)
    ((tokens, target),) = [step[mesh["data"].get_local_rank()] for step in batches(seed, 2)]
    num_items = global_num_items(target, V, shift=1, group=mesh["data"].get_group())
    model(tokens, target, num_items).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_fsdp2_and_a_vocabulary_over_ranks(ranks: Ranks, rng: torch.Generator) -> None:
    seed = int(torch.randint(2**31, (), generator=rng))
    expected = whole_batch_gradients(seed, 2, False)
    for gradients in ranks(gradients_on_a_square, seed):
        for name, gradient in gradients.items():
            assert_close_rel(gradient, expected[name], 1e-5, what=name)


def recomputed_after_resharding(unshard: bool) -> None:
    """A loss per row recomputes in backward: it needs the weight again."""
    model = model_of(0, False, reduction="none")
    fully_shard(model.head)
    fully_shard(model)
    model.head.set_unshard_in_backward(unshard)
    ((tokens, target), *_) = batches(0, 1)[0]
    loss = model(tokens, target).sum()
    if unshard:
        loss.backward()
        assert model.head.weight.grad.full_tensor().any()
    else:
        with pytest.raises(RuntimeError, match="syncfree::flce_forward: linear_weight must still be there"):
            loss.backward()


@pytest.mark.parametrize("unshard", [True, False])
def test_a_recompute_needs_the_weight(unshard: bool, ranks: Ranks) -> None:
    ranks(recomputed_after_resharding, unshard)


def sharded_outside() -> None:
    head = sf.LinearCrossEntropyHead(H, V)
    fully_shard(head)
    with pytest.raises(TypeError, match="linear_weight must be a plain tensor, got a DTensor"):
        sf.linear_cross_entropy(torch.randn(3, H), head.weight, torch.zeros(3, dtype=torch.int64))


def test_a_weight_outside_its_module_is_refused(ranks: Ranks) -> None:
    ranks(sharded_outside)


# ------------------------------------------------------------------------------------------------ counts and shifts


def counted(target: Tensor, options: dict[str, Any]) -> Tensor:
    return global_num_items(target[dist.get_rank()], V, **options)


@SIZES
def test_global_num_items(ranks: Ranks, rng: torch.Generator) -> None:
    target = torch.randint(V, (ranks.size, B, T), generator=rng)
    target[torch.rand(target.shape, generator=rng) < 0.4] = 3
    weight = torch.rand(V, generator=rng)
    for options in ({}, {"ignore_index": 3}, {"ignore_index": 3, "shift": 2}, {"weight": weight, "ignore_index": 3}):
        scored = target[..., options.get("shift", 0) :]
        scored = scored[scored != options.get("ignore_index", -100)]
        expected = weight[scored].double().sum() if "weight" in options else torch.tensor(float(len(scored)))
        for result in ranks(counted, target, options):
            assert result.dtype == torch.float64
            assert result.shape == ()
            assert_close_rel(result, expected / ranks.size, 1e-12)


def loss_without_targets() -> tuple[Tensor, Tensor]:
    target = torch.full((2, T), -100)
    x, w = torch.randn(2, T, H, requires_grad=True), torch.randn(V, H)
    num_items = global_num_items(target, V)
    loss = sf.linear_cross_entropy(x, w, target, num_items=num_items)
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def test_no_target_on_any_rank(ranks: Ranks) -> None:
    for tensors in ranks(loss_without_targets):
        assert not any(t.any() for t in tensors)


def refused_counts() -> None:
    target = torch.zeros(3, dtype=torch.int64)
    for error, message, arguments in (
        (TypeError, "target must be int64 or int32", {"target": target.float()}),
        (ValueError, "at least one tensor", {"target": []}),
        (ValueError, "shift must be at least 0", {"target": target, "shift": -1}),
        (ValueError, "num_classes must be at least 1", {"target": target, "num_classes": 0}),
        (ValueError, "weight must have shape", {"target": target, "weight": torch.ones(V + 1)}),
        (IndexError, "expected a class in", {"target": target + V}),
    ):
        with pytest.raises(error, match=message):
            global_num_items(**({"num_classes": V} | arguments))
    for message, arguments in (
        (r"shift must be at least 0", (target, -1)),
        (r"at least shift=4 positions on each rank, got shape \(3,\)", (target, 4)),
        (r"got shape \(\)", (target[0], 1)),
    ):
        with pytest.raises(ValueError, match=message):
            shift_sequence(*arguments, fill=-100)
    with pytest.raises(TypeError, match=r"values must be a torch\.Tensor"):
        shift_sequence([1], 1, fill=0)


def test_refusals(ranks: Ranks) -> None:
    ranks(refused_counts)


def sequence_gradients(x: Tensor, w: Tensor, target: Tensor, token_weight: Tensor, at: list[int], shift: int) -> Any:
    """This rank's slice of the sequence, its divisor and its targets from over the cut."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    here = slice(at[rank], at[rank + 1])
    x, w = x[:, here].requires_grad_(), w.requires_grad_()
    shifted = shift_sequence(target[:, here], shift, fill=-100)
    weights = shift_sequence(token_weight[:, here], shift, fill=0)
    num_items = global_num_items(shifted, V)
    loss = sf.linear_cross_entropy(x, w, shifted, token_weight=weights, num_items=num_items)
    dx, dw = torch.autograd.grad(loss, (x, w))
    loss = loss.detach()
    for mean in (loss, dw):  # as DDP and FSDP would
        dist.all_reduce(mean)
        mean /= ranks
    return loss, dx / ranks, dw, shifted


@SIZES
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_a_sequence_over_ranks(shift: int, ranks: Ranks, rng: torch.Generator) -> None:
    x, w = torch.randn(B, 5 * ranks.size, H, generator=rng), torch.randn(V, H, generator=rng)
    target = torch.randint(V, x.shape[:2], generator=rng)
    target[torch.rand(target.shape, generator=rng) < 0.3] = -100
    token_weight = torch.rand(target.shape, generator=rng)
    at = [0, *(5 * i + (-1) ** i for i in range(1, ranks.size)), 5 * ranks.size]  # slices of 4 to 7 positions
    x.requires_grad_(), w.requires_grad_()
    whole = sf.linear_cross_entropy(x, w, target, token_weight=token_weight, shift=shift)
    whole.backward()
    answers = ranks(sequence_gradients, x.detach(), w.detach(), target, token_weight, at, shift)
    expected = torch.cat((target[:, shift:], torch.full((B, shift), -100)), 1)
    assert_equal(torch.cat([answer[3] for answer in answers], 1), expected)
    assert_close_rel(torch.cat([answer[1] for answer in answers], 1), x.grad, 1e-5, what="dx")
    for loss, _, dw, _ in answers:
        assert_close_rel(loss, whole, 1e-6, what="loss")
        assert_close_rel(dw, w.grad, 1e-5, what="dw")
