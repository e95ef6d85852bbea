"""The loss head over a vocabulary that is spread over ranks: the driver between the ops, and its autograd.

Each rank holds the classes [first_class, first_class + n) of linear_weight, and all of input and target. A chunk of
rows takes four steps (_vocab_parallel_chunks.py; here the ops of csrc/common/flce_shard.h) and, between them, three
collectives over the rows of the chunk:

    flce_shard_logits            logits of the slice; of each row the largest other one, m_s, S_s = Σ exp(l - m_s), l_t
    all_reduce max               m = max_s m_s
    all_reduce sum               S = Σ_s S_s exp(m_s - m), l_t from the rank that has it, label smoothing's Σ c (l - m)
    flce_shard_gradient          losses; the logits become their gradient g; dX's share g W_s
    all_reduce sum (async)       dX, in the dtype of the sums, while this runs:
    flce_shard_weight_gradient   dW_s += gᵀ x, db_s += Σ g
    flce_shard_store_dx          dX, rounded once

The Hopper path (csrc/cuda/ops/fused_shard.cpp) takes the same steps with other statistics, after one all_reduce of the
targets' logits, which set the exponents of all rows.

So every rank ends with the same statistics, bit for bit, and with the same losses and dX. All of it is enqueued:
nothing is read on the host, and shapes and the number of chunks follow from what is the same on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from syncfree_ext.ops import _OPTION_TENSORS, _FlceForward, _once_differentiable, check_not_resharded

from ._vocab_parallel_chunks import FusedChunks, GeneralChunks, Gradients, Needs, Results

_syncfree = torch.ops.syncfree

# Slots of counts (csrc/common/params.h).
_COUNT_ROWS, _INVERSE_CE, _INVERSE_Z = 0, 3, 4


@dataclass(frozen=True)
class VocabSlice:
    """What this rank's slice of the vocabulary is a slice of, and how it is worked through.

    Attributes:
        group: the ranks that hold the vocabulary between them.
        first_class: the class of the first row of this rank's linear_weight.
        num_classes: V, of all ranks.
        compute_dtype: of the matrix products.
        lean: add the weight gradient up in the dtype of the products.
        chunk_rows: rows of logits at a time; None: chosen from workspace_bytes.
        workspace_bytes: for those logits; None: the constant of the device.
    """

    group: dist.ProcessGroup
    first_class: int
    num_classes: int
    compute_dtype: torch.dtype
    lean: bool
    chunk_rows: int | None
    workspace_bytes: int | None

    @property
    def acc_dtype(self) -> torch.dtype:
        """The dtype of sums."""
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32

    @property
    def largest_slice(self) -> int:
        """That of all, where the classes are spread evenly: what no two ranks see differently."""
        return -(-self.num_classes // dist.get_world_size(self.group))

    def rows_of_a_chunk(self, rows: int, device: torch.device) -> int:
        """The rows of a chunk, from numbers that no two ranks see differently: a slice's own size is not among them."""
        on_gpu = device.type == "cuda"
        multiple, least, workspace = (128, 1024, 1 << 30) if on_gpu else (1, 512, 64 << 20)
        if self.chunk_rows is not None:
            size = self.chunk_rows
        else:
            row_bytes = self.largest_slice * self.acc_dtype.itemsize
            size = max((self.workspace_bytes or workspace) // row_bytes, 1 if self.workspace_bytes else least)
            size = max(size // multiple * multiple, 1)
            size = -(-rows // -(-rows // size)) if rows else 1  # the same for each chunk, but for rounding
        return min(-(-size // multiple) * multiple, max(rows, 1))

    def rows_of_a_fused_chunk(
        self, input: Tensor, leaf_dtype: torch.dtype, biased: bool, options: dict[str, Any]
    ) -> int:
        """The same for the Hopper path; 0 where it does not take the call. No two ranks see it differently either."""
        rows: int = _syncfree.flce_shard_fused_rows.default(
            input,
            self.largest_slice,
            compute_dtype=self.compute_dtype,
            weight_dtype=leaf_dtype,
            biased=biased,
            label_smoothing=options["label_smoothing"],
            softcap=options["softcap"],
            chunk_rows=self.chunk_rows,
            workspace_bytes=self.workspace_bytes,
            lean=self.lean,
        )
        return rows


class Outputs(NamedTuple):
    """As those of `flce_forward`: what was not asked for has shape [0]."""

    loss: Tensor
    z_loss: Tensor
    token_accuracy: Tensor
    predicted_tokens: Tensor
    logsumexp: Tensor


class Run:
    """One pass over all rows: the outputs of a forward, and the gradients for an upstream gradient of 1."""

    def __init__(
        self,
        part: VocabSlice,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        options: dict[str, Any],
    ) -> None:
        self.part, self.input, self.target = part, input, target
        self.leaf_dtype = linear_weight.dtype
        self.weight = linear_weight.to(part.compute_dtype)
        self.bias = None if linear_bias is None else linear_bias.to(part.acc_dtype)
        self.options = options | {
            name: options[name].to(part.acc_dtype)
            for name in ("weight", "token_weight")
            if options.get(name) is not None
        }
        self.reduction: str = options["reduction"]
        self.counts, self.order = _syncfree.count_targets.default(
            target,
            part.num_classes,
            **{
                name: self.options.get(name)
                for name in ("weight", "token_weight", "num_items", "reduction", "ignore_index", "shift")
            },
        )
        self.rows = input.shape[0]
        fused_rows = part.rows_of_a_fused_chunk(input, self.leaf_dtype, self.bias is not None, options)
        self.chunks = FusedChunks if fused_rows else GeneralChunks
        self.chunk = fused_rows or part.rows_of_a_chunk(self.rows, input.device)
        self.slice = {"first_class": part.first_class, "num_classes": part.num_classes}

    def __call__(
        self, need_dx: bool, need_dw: bool, need_db: bool, need_predicted: bool = False, need_logsumexp: bool = False
    ) -> Results:
        """Work through all rows."""
        chunks = self.chunks(self, Needs(need_dx, need_dw, need_db, need_predicted, need_logsumexp))
        for first in range(0, self.rows, self.chunk):
            chunks.logits(first)
            dx_sum = chunks.gradient(first)
            work = dist.all_reduce(dx_sum, dist.ReduceOp.SUM, self.part.group, async_op=True) if need_dx else None
            chunks.weight_gradient(first)
            if work is not None:
                work.wait()  # the stream waits, not the host
                chunks.store_dx(first, dx_sum)
        return chunks.results()

    def forward(
        self, needs: Sequence[bool], need_token_accuracy: bool, need_predicted_tokens: bool, need_logsumexp: bool
    ) -> tuple[Outputs, Gradients]:
        """The results as `flce_forward` gives them."""
        need_argmax = need_token_accuracy or need_predicted_tokens
        ce, z, predicted, logsumexp, gradients = self(
            needs[0], needs[1], needs[2], need_predicted=need_argmax, need_logsumexp=need_logsumexp
        )
        accuracy = self.input.new_empty((0,), dtype=torch.float32)
        if need_token_accuracy:
            # Of an ignored row -1 is predicted, and its target is no class, or ignore_index and as good as none.
            correct = ((predicted == self.row_targets()) & (predicted >= 0)).float()
            accuracy = correct
            if self.reduction != "none":
                accuracy = (correct.sum(dtype=torch.float64) / self.counts[_COUNT_ROWS].clamp(min=1)).float()
        if self.reduction == "none":
            loss, z_loss = ce + z, z
        else:
            z_part = z.sum(dtype=torch.float64) * self.counts[_INVERSE_Z]
            loss = (ce.sum(dtype=torch.float64) * self.counts[_INVERSE_CE] + z_part).to(ce.dtype)
            z_loss = z_part.to(ce.dtype)
        if not need_predicted_tokens:
            predicted = predicted.new_empty((0,))
        return Outputs(loss, z_loss, accuracy, predicted, logsumexp), gradients

    def all_reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        """In place, over the ranks that share the vocabulary."""
        dist.all_reduce(tensor, operation, self.part.group)
        return tensor

    def row_targets(self) -> Tensor:
        """The target of each row. Rows without one, which are among the ignored, get some other row's."""
        shift = self.options["shift"]
        return (self.target.roll(-shift, -1) if shift else self.target).flatten()


class VocabParallel(Function):
    """Autograd of the loss over a slice: as that of `flce_forward`, with collectives in a backward that recomputes."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        part: VocabSlice,
        options: dict[str, Any],
        wanted: dict[str, bool],
        differentiate: bool,
    ) -> tuple[Tensor, ...]:
        """Return the five `Outputs`."""
        # "none" has no gradient before the upstream gradient of each row is known.
        differentiate = differentiate and options["reduction"] != "none"
        ctx.computed = tuple(differentiate and need for need in ctx.needs_input_grad[:3])
        run = Run(part, input, linear_weight, linear_bias, target, options)
        outputs, ctx.gradients = run.forward(ctx.computed, **wanted)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.save_for_backward(
            input, linear_weight, target, linear_bias, *(options.get(name) for name in _OPTION_TENSORS)
        )
        ctx.part = part
        ctx.options = {name: value for name, value in options.items() if name not in _OPTION_TENSORS}
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Scale the kept gradients in place and give them away, or compute them anew."""
        upstream = grad_outputs[0]
        needed = ctx.needs_input_grad[:3]
        if upstream is None or not any(needed):
            return (None,) * 8
        with torch.no_grad():
            scale = upstream
            if ctx.gradients is None or any(n and not has for n, has in zip(needed, ctx.computed, strict=True)):
                scale = VocabParallel._recompute(ctx, upstream, needed)
            gradients = _FlceForward._give_away(ctx, scale, needed)
        if torch.is_grad_enabled():
            anchors = (upstream, *ctx.saved_tensors[:4])
            gradients = _once_differentiable("vocab_parallel_linear_cross_entropy", gradients, anchors)
        return (*gradients, None, None, None, None, None)

    @staticmethod
    def _recompute(ctx: Any, upstream: Tensor, needed: Sequence[bool]) -> Tensor:
        """Put new gradients into ctx and return what they are still to be multiplied by."""
        hidden, linear_weight, target, linear_bias, *tensors = ctx.saved_tensors
        check_not_resharded("vocab_parallel_linear_cross_entropy", linear_weight)
        options = ctx.options | dict(zip(_OPTION_TENSORS, tensors, strict=True))
        if options["reduction"] == "none":
            # The upstream gradient of a row is one more factor of it. Token weights are read at the row's target.
            factor = upstream.view(target.shape).roll(options["shift"], -1)
            weights = options["token_weight"]
            options["token_weight"] = factor if weights is None else factor * weights.to(factor.dtype)
            upstream = upstream.new_ones(())
        run = Run(ctx.part, hidden, linear_weight, linear_bias, target, options)
        ctx.gradients = run(*needed).gradients
        return upstream
