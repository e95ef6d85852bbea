"""The loss head on several ranks: a vocabulary spread over them, a divisor and a shift that span them.

docs/distributed.md says which of these a data-, tensor- or sequence-parallel model needs, and derives the factors. All
of it rests on torch.distributed alone. With NCCL no function here waits for the GPU; with gloo, collectives wait as
gloo does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from syncfree_ext import _checks
from syncfree_ext.functional import (
    LinearCrossEntropyOutput,
    Number,
    Reduction,
    _as_matrix,
    _as_sequences,
    _check_returns,
    _check_rows,
    _loss_options,
    _named_outputs,
    _per_row,
)
from syncfree_ext.ops import _compute_dtype, _is_lean

from ._vocab_parallel import VocabParallel, VocabSlice

__all__ = ["global_num_items", "shift_sequence", "vocab_parallel_linear_cross_entropy"]


@_disable_dynamo  # torch.compiler.disable, but for its import of all of Dynamo
def vocab_parallel_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    num_classes: int | None = None,
    first_class: int | None = None,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    num_items: Number | Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    token_scaling: bool = False,
    logit_scale: float | Tensor = 1.0,
    z_loss_weight: float | Tensor = 0.0,
    shift: int = 0,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    return_logsumexp: bool = False,
    chunk_rows: int | None = None,
    workspace_bytes: int | None = None,
    accum_dtype: torch.dtype | None = None,
) -> Tensor | LinearCrossEntropyOutput:
    """`linear_cross_entropy` for a linear_weight whose classes are spread over the ranks of a group.

    Each rank scores its own classes, a chunk of rows at a time; per row three to five numbers are exchanged over the
    group, and dX is added up in float32 before it is rounded. The loss, what is returned beside it, and the gradient of
    input are the same on each rank; the gradients of linear_weight and linear_bias are those of the rank's slice.

    This is a collective: each rank of the group calls it with the same input, target and options, with leaves that
    require gradients alike, and runs the same backward. Under torch.compile it is a graph break.

    Args:
        input: (..., H), the same on each rank: a plain tensor, or a DTensor on the mesh of linear_weight, which is
            gathered if it is sharded (its gradient is sharded again).
        linear_weight: a DTensor (V, H) with placements (Shard(0),) on a mesh of one dimension, with any V; or this
            rank's slice (n, H), a plain tensor, together with num_classes. n may differ between ranks, and may be 0.
        target: (...), the classes of the whole vocabulary; plain or DTensor, as input.
        group: of a plain linear_weight: the ranks that share the vocabulary, in the order of their slices. None: all.
        num_classes: V, for a plain linear_weight.
        first_class: the class of the first row of a plain linear_weight. None: the slices are those of torch.chunk,
            as DTensor cuts them. The slices of all ranks must make up the vocabulary; this is not checked, as it would
            take a message that the host waits for.
        linear_bias: (n,), or a DTensor (V,) sharded as linear_weight.
        weight: (V,), for all classes on each rank.
        token_weight: (...), aligned with target; plain or DTensor, as input.
        chunk_rows: how many rows of the slice's logits exist at a time. Must be the same on each rank.
        workspace_bytes: memory for those logits. Must be the same on each rank.
        num_items: as in `linear_cross_entropy`, as are all options not listed here.
        reduction: see there.
        ignore_index: see there.
        label_smoothing: see there.
        softcap: see there.
        token_scaling: see there.
        logit_scale: see there.
        z_loss_weight: see there.
        shift: see there.
        return_z_loss: see there.
        return_token_accuracy: see there.
        return_predicted_tokens: see there.
        return_logsumexp: see there.
        accum_dtype: see there.

    Returns:
        The loss, or, if any return_* is set, a LinearCrossEntropyOutput; plain tensors.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, device, placement or value does not fit, or an option tensor requires grad.
        IndexError: on the CPU, a target is outside [0, V) and not ignore_index; on CUDA such a row gives NaN.
        RuntimeError: there is no process group, or a backward that computes gradients anew finds that FSDP has freed
            linear_weight.
    """
    name = "syncfree_ext.integrations.distributed.vocab_parallel_linear_cross_entropy"
    if isinstance(linear_weight, DTensor):
        if num_classes is not None or first_class is not None:
            raise ValueError(f"{name}: num_classes and first_class must be None for a linear_weight that is a DTensor")
        mesh = linear_weight.device_mesh
        group, classes, first = _mesh_slice(name, linear_weight, group)
        linear_weight = _local(name, "linear_weight", linear_weight, mesh)
        if isinstance(linear_bias, DTensor):
            linear_bias = _local(name, "linear_bias", linear_bias, mesh)
        hidden = _whole(name, "input", input, mesh)
        target = _whole(name, "target", target, mesh)
        token_weight = None if token_weight is None else _whole(name, "token_weight", token_weight, mesh)
    else:
        hidden, group = input, _group(name, group)
        _checks.check_tensor(name, "linear_weight", linear_weight)
        if num_classes is None:
            raise ValueError(
                f"{name}: num_classes must be given for a linear_weight that is no DTensor: the slices of the other "
                "ranks are not known here"
            )
        _checks.check_at_least(name, "num_classes", num_classes, 1)
        classes = num_classes
        first = _first_class(name, linear_weight, group, classes, first_class)
    _check_slice(name, hidden, linear_weight, linear_bias, first, classes)
    _checks.check_target(name, target, "input", hidden)
    _check_returns(name, return_z_loss, return_token_accuracy, return_predicted_tokens, return_logsumexp)
    options = _loss_options(
        name,
        hidden,
        classes,
        target,
        weight,
        token_weight,
        num_items,
        reduction,
        ignore_index,
        label_smoothing,
        softcap,
        token_scaling,
        logit_scale,
        z_loss_weight,
        shift,
    )
    for argument, value in (("chunk_rows", chunk_rows), ("workspace_bytes", workspace_bytes)):
        if value is not None:
            _checks.check_at_least(name, argument, value, 1)
    compute = _compute_dtype(hidden, linear_weight)
    part = VocabSlice(
        group, first, classes, compute, _is_lean(accum_dtype, compute, linear_weight), chunk_rows, workspace_bytes
    )
    wanted = {
        "need_token_accuracy": return_token_accuracy,
        "need_predicted_tokens": return_predicted_tokens,
        "need_logsumexp": return_logsumexp,
    }
    outputs = VocabParallel.apply(
        _as_matrix(hidden),
        linear_weight,
        linear_bias,
        _as_sequences(target),
        part,
        options,
        wanted,
        torch.is_grad_enabled(),
    )
    if not (return_z_loss or return_token_accuracy or return_predicted_tokens or return_logsumexp):
        return _per_row(outputs[0], target, reduction)
    return _named_outputs(
        outputs, target, reduction, return_z_loss, return_token_accuracy, return_predicted_tokens, return_logsumexp
    )


def global_num_items(
    target: Tensor | Sequence[Tensor],
    num_classes: int,
    *,
    group: dist.ProcessGroup | None = None,
    weight: Tensor | None = None,
    ignore_index: int | None = None,
    shift: int = 0,
) -> Tensor:
    """The `num_items` with which a mean over data-parallel ranks is the mean over all their tokens.

    DDP and FSDP average gradients over the R ranks of the group. With N tokens in all, each rank passes N / R: the
    average of the R losses Σ_i L_i / (N / R) is Σ L_i / N over all ranks, however unevenly the tokens lie. The same
    holds for micro-batches whose gradients are added up: give the targets of all of them and pass the result to each.

    A collective over the group; its result stays on the device and is never read on the host.

    Args:
        target: (...), of this rank, or a sequence of such: the micro-batches of a step.
        num_classes: V.
        group: the ranks over which gradients are averaged. None: all. Ranks that share a vocabulary hold the same
            targets, so theirs is not the group.
        weight: (V,), class weights, if the loss has them; then N is the sum of the targets' weights.
        ignore_index: as in the loss.
        shift: as in the loss. 0 for targets that `shift_sequence` has shifted.

    Returns:
        0-D float64 on the device of target: N / R. 0 if no rank has a target; the loss is then 0.

    Raises:
        TypeError: target is no integer tensor, or is a DTensor.
        ValueError: an argument does not fit.
    """
    name = "syncfree_ext.integrations.distributed.global_num_items"
    targets = [target] if isinstance(target, Tensor) else list(target)
    if not targets:
        raise ValueError(f"{name}: target must hold at least one tensor, got an empty sequence")
    _checks.check_at_least(name, "num_classes", num_classes, 1)
    _checks.check_at_least(name, "shift", shift, 0)
    if ignore_index is not None:
        _checks.check_integer(name, "ignore_index", ignore_index)
    options: dict[str, Any] = {"weight": weight, "shift": shift}
    options |= {} if ignore_index is None else {"ignore_index": ignore_index}
    counted = []
    for each in targets:
        _checks.check_tensor(name, "target", each)
        if each.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{name}: target must be int64 or int32 class indices, got {each.dtype}")
        _checks.check_device(name, "target", each, targets[0].device)
        _checks.check_optional_vector(name, "weight", weight, each, (num_classes,), "one entry for each class", False)
        counts = torch.ops.syncfree.count_targets(_as_sequences(each), num_classes, **options)[0]
        counted.append(counts[0 if weight is None else 1])
    total = torch.stack(counted).sum()
    dist.all_reduce(total, dist.ReduceOp.SUM, group)
    return total / dist.get_world_size(group)


def shift_sequence(values: Tensor, shift: int, *, fill: float, group: dist.ProcessGroup | None = None) -> Tensor:
    """Move what is aligned with a sequence that is cut over ranks `shift` positions to the left, over the cuts.

    The `shift` option of the losses ends at the end of a tensor. Where each rank holds a slice of the sequence, its
    last positions are scored against the next rank's first targets: shift the targets with this, their token weights
    too, and call the loss with shift=0.

    A collective over the group (one all_gather of `shift` positions); no gradient flows through it.

    Args:
        values: (..., T), of this rank; T may differ between ranks, and is at least shift on each.
        shift: as in the losses.
        fill: for what is past the end of the whole sequence: ignore_index for targets, 0 for token weights.
        group: the ranks of one sequence, in the order of their slices, each of which is contiguous. None: all.

    Returns:
        The shape and dtype of values: values[..., t + shift] of the whole sequence.

    Raises:
        TypeError: values is no plain tensor.
        ValueError: shift is negative, or a slice is shorter than shift, so that its targets lie beyond the next rank.
    """
    name = "syncfree_ext.integrations.distributed.shift_sequence"
    _checks.check_tensor(name, "values", values)
    _checks.check_at_least(name, "shift", shift, 0)
    if values.dim() == 0 or values.shape[-1] < shift:
        raise ValueError(
            f"{name}: values must hold at least shift={shift} positions on each rank, got shape {tuple(values.shape)}"
        )
    if shift == 0:
        return values
    with torch.no_grad():
        first = values[..., :shift].contiguous()
        firsts = [torch.empty_like(first) for _ in range(dist.get_world_size(group))]
        dist.all_gather(firsts, first, group)
        firsts.append(torch.full_like(first, fill))
        return torch.cat((values[..., shift:], firsts[dist.get_rank(group) + 1]), -1)


# -------------------------------------------------------------------------------------------------------------- slices


def _group(function: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = dist.group.WORLD if group is None and dist.is_initialized() else group
    if group is None:
        raise RuntimeError(f"{function}: torch.distributed.init_process_group must have been called")
    return group


def _even_slice(classes: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """First class and number of classes of this rank, as torch.chunk and DTensor cut them."""
    size = -(-classes // dist.get_world_size(group))
    first = min(size * dist.get_rank(group), classes)
    return first, min(size, classes - first)


def _first_class(
    function: str, linear_weight: Tensor, group: dist.ProcessGroup, classes: int, first_class: int | None
) -> int:
    if first_class is not None:
        _checks.check_at_least(function, "first_class", first_class, 0)
        return first_class
    first, size = _even_slice(classes, group)
    if linear_weight.shape[:1] != (size,):
        raise ValueError(
            f"{function}: linear_weight must have shape ({size}, H), rank {dist.get_rank(group)}'s part of {classes} "
            f"classes as torch.chunk cuts them, got {tuple(linear_weight.shape)}; give first_class for other slices"
        )
    return first


def _mesh_slice(
    function: str, linear_weight: DTensor, group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, int, int]:
    mesh = linear_weight.device_mesh
    if mesh.ndim != 1 or not linear_weight.placements[0].is_shard(0) or linear_weight.dim() != 2:
        raise ValueError(
            f"{function}: linear_weight must be a DTensor (V, H) with placements (Shard(0),) on a mesh of one "
            f"dimension, got {tuple(linear_weight.shape)} with {linear_weight.placements} on {mesh}; call the loss "
            "inside the module that fully_shard wraps, or redistribute the weight"
        )
    if group is not None and group != mesh.get_group():
        raise ValueError(f"{function}: group must be None or the group of linear_weight's mesh, got another one")
    classes = linear_weight.shape[0]
    return mesh.get_group(), classes, _even_slice(classes, mesh.get_group())[0]


def _local(function: str, name: str, tensor: DTensor, mesh: DeviceMesh) -> Tensor:
    """This rank's slice of a tensor that is sharded over the classes; its gradient is sharded alike."""
    if tensor.device_mesh != mesh or not tensor.placements[0].is_shard(0):
        raise ValueError(
            f"{function}: {name} must be sharded as linear_weight, (Shard(0),) on {mesh}, got {tensor.placements} on "
            f"{tensor.device_mesh}"
        )
    return tensor.to_local()


def _whole(function: str, name: str, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A tensor that each rank needs whole. Its gradient is whole on each rank, too."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh != mesh:
        raise ValueError(
            f"{function}: {name} must be a plain tensor or on the mesh of linear_weight, {mesh}, got "
            f"{tensor.device_mesh}"
        )
    return tensor.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Replicate()])


def _check_slice(
    function: str, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, first: int, classes: int
) -> None:
    _check_rows(function, "input", input)
    _checks.check_floating(function, "linear_weight", linear_weight)
    _checks.check_device(function, "linear_weight", linear_weight, input.device)
    hidden, shape = input.shape[-1], tuple(linear_weight.shape)
    if len(shape) != 2 or shape[1] != hidden or hidden == 0:
        raise ValueError(
            f"{function}: linear_weight must have shape (classes, {hidden}) for input of shape {tuple(input.shape)}, "
            f"got {shape}"
        )
    if first + shape[0] > classes:
        raise ValueError(
            f"{function}: first_class must leave room for {shape[0]} of {classes} classes, got first_class={first}"
        )
    _checks.check_optional_vector(
        function, "linear_bias", linear_bias, input, shape[:1], "one entry for each class of the slice", True
    )
