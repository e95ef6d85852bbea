"""The loss head over a vocabulary that is spread over ranks: the driver between the ops, and its autograd.

Each rank holds the classes [first_class, first_class + n) of linear_weight, and all of input and target. A chunk of
rows takes four ops (csrc/common/flce_shard.h) and, between them, three collectives over the rows of the chunk:

    flce_shard_logits            logits of the slice; of each row the largest other one, m_s, S_s = Σ exp(l - m_s), l_t
    all_reduce max               m = max_s m_s
    all_reduce sum               S = Σ_s S_s exp(m_s - m), l_t from the rank that has it, label smoothing's Σ c (l - m)
    flce_shard_gradient          losses; the logits become their gradient g; dX's share g W_s
    all_reduce sum (async)       dX, in the dtype of the sums, while this runs:
    flce_shard_weight_gradient   dW_s += gᵀ x, db_s += Σ g
    flce_shard_store_dx          dX, rounded once

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

_syncfree = torch.ops.syncfree

# Slots of counts (csrc/common/params.h).
_COUNT_ROWS, _COUNT_CLASSES, _INVERSE_CE, _INVERSE_Z = 0, 2, 3, 4


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

    def rows_of_a_chunk(self, rows: int, device: torch.device) -> int:
        """The rows of a chunk, from numbers that no two ranks see differently: a slice's own size is not among them."""
        on_gpu = device.type == "cuda"
        multiple, least, workspace = (128, 1024, 1 << 30) if on_gpu else (1, 512, 64 << 20)
        if self.chunk_rows is not None:
            size = self.chunk_rows
        else:
            largest_slice = -(-self.num_classes // dist.get_world_size(self.group))
            row_bytes = largest_slice * self.acc_dtype.itemsize
            size = max((self.workspace_bytes or workspace) // row_bytes, 1 if self.workspace_bytes else least)
            size = max(size // multiple * multiple, 1)
            size = -(-rows // -(-rows // size)) if rows else 1  # the same for each chunk, but for rounding
        return min(-(-size // multiple) * multiple, max(rows, 1))


class Outputs(NamedTuple):
    """As those of `flce_forward`: what was not asked for has shape [0]."""

    loss: Tensor
    z_loss: Tensor
    token_accuracy: Tensor
    predicted_tokens: Tensor
    logsumexp: Tensor


class Gradients(NamedTuple):
    """As those of `flce_forward`, dw and db of this slice."""

    dx: Tensor
    dw: Tensor
    db: Tensor
    dx_scale: Tensor
    dw_scale: Tensor


def _all_reduce(tensor: Tensor, operation: Any, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(tensor, operation, group)
    return tensor


def _combine(
    stats: Tensor, absent: Tensor, classes_here: Tensor, classes: Tensor, smoothing: bool, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """The statistics [n, 4] of all classes from those of each slice, and the largest logit of this slice.

    absent: whether a row's target is a class of another slice. classes_here, classes: the class weights of this slice
    and of all, summed (C of docs/semantics.md).
    """
    largest, others, own, smooth = stats.unbind(1)
    # Where the target is absent, `own` is the logit that smooth is relative to, of a class that is among the others.
    largest_here = torch.maximum(largest, own.masked_fill(absent, -torch.inf))
    top = _all_reduce(largest.clone(), dist.ReduceOp.MAX, group)
    # All others at -inf: any finite base gives their exact sum, 0.
    base = top.masked_fill(top == -torch.inf, 0)
    parts = [others * torch.exp(largest - base), own.masked_fill(absent, 0)]
    if smoothing:
        parts.append(smooth + classes_here * (_finite(own) - base))
    sums = _all_reduce(torch.stack(parts), dist.ReduceOp.SUM, group)
    smooth = sums[2] + classes * (base - _finite(sums[1])) if smoothing else sums[0]
    return torch.stack((top, sums[0], sums[1], smooth), 1), largest_here


def _finite(logit: Tensor) -> Tensor:
    """What logits are summed relative to (smooth_base of csrc/common/formulas.h)."""
    return torch.where(torch.isfinite(logit), logit, 0)


def _half_rows(sums: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in float16, their largest entries brought to [2^14, 2^15) by powers of two, and what removes these."""
    largest = torch.linalg.vector_norm(sums, torch.inf, dim=1)
    exponent = torch.frexp(largest).exponent
    usable = (largest > 0) & torch.isfinite(largest)
    remove = torch.where(usable, torch.ldexp(torch.ones_like(largest), (exponent - 15).clamp(-126, 126)), 1)
    return sums.div_(remove.unsqueeze(1)).half(), remove.float()


def _row_targets(target: Tensor, shift: int) -> Tensor:
    """The target of each row. Rows without one, which are among the ignored, get some other row's."""
    return (target.roll(-shift, -1) if shift else target).flatten()


class _Run:
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
        self.chunk = part.rows_of_a_chunk(self.rows, input.device)
        self.slice = {"first_class": part.first_class, "num_classes": part.num_classes}

    def __call__(
        self, need_dx: bool, need_dw: bool, need_db: bool, need_predicted: bool = False, need_logsumexp: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Gradients]:
        """Return ce and z of each row, predicted_tokens, logsumexp and the gradients."""
        part, acc = self.part, self.part.acc_dtype
        classes, hidden = self.weight.shape
        need_gradient = need_dx or need_dw or need_db
        ce, z = self.input.new_empty((2, self.rows), dtype=acc).unbind()
        logsumexp = self.input.new_empty((self.rows if need_logsumexp else 0,), dtype=acc)
        predicted = self.input.new_empty((self.rows if need_predicted else 0,), dtype=torch.int64)
        # The largest logit of this slice and of all, in the order in which rows are worked on.
        largest = self.input.new_empty((2, self.rows if need_predicted else 0), dtype=acc)
        dx = self.input.new_empty((self.rows, hidden) if need_dx else (0,))
        dx_scale = self._scales(dx, self.rows, need_dx)
        dw = self.weight.new_empty((classes, hidden) if need_dw else (0,), dtype=self._dtype_of_dw_sum())
        db = self.weight.new_empty((classes if need_db else 0,), dtype=acc)
        alpha = self.input.new_ones((3,), dtype=acc)
        if self.rows == 0:
            dw.zero_()
            db.zero_()

        absent, classes_here, total = (
            self._target_is_elsewhere(),
            self._sum_of_weights(),
            self.counts[_COUNT_CLASSES].to(acc),
        )
        for first in range(0, self.rows, self.chunk):
            size = min(self.chunk, self.rows - first)
            here = slice(first, first + size)
            gathered, logits, stats = _syncfree.flce_shard_logits.default(
                self.input,
                self.weight,
                self.target,
                self.counts,
                self.order,
                self.bias,
                first_row=first,
                chunk_rows=size,
                predicted_tokens=predicted if need_predicted else None,
                **self.slice,
                **self.options,
            )
            stats, largest_here = _combine(
                stats, absent[here], classes_here, total, self.options["label_smoothing"] > 0, part.group
            )
            if need_predicted:
                largest[0, here] = largest_here
                largest[1, here] = torch.maximum(stats[:, 0], stats[:, 2])
            dx_sum, alpha_here = _syncfree.flce_shard_gradient.default(
                logits,
                stats,
                self.weight,
                self.target,
                self.counts,
                self.order,
                ce,
                z,
                logsumexp if need_logsumexp else None,
                self.bias,
                first_row=first,
                need_gradient=need_gradient,
                need_dx=need_dx,
                **self.slice,
                **self.options,
            )
            alpha = alpha_here if need_gradient else alpha
            work = dist.all_reduce(dx_sum, dist.ReduceOp.SUM, part.group, async_op=True) if need_dx else None
            if need_dw or need_db:
                _syncfree.flce_shard_weight_gradient.default(
                    logits,
                    gathered,
                    self.counts,
                    self.order,
                    alpha,
                    dw if need_dw else None,
                    db if need_db else None,
                    first_row=first,
                    accumulate=first > 0,
                )
            del logits, gathered  # the next chunk takes their memory
            if work is not None:
                work.wait()  # the stream waits, not the host
                _syncfree.flce_shard_store_dx.default(
                    dx_sum, self.counts, self.order, alpha, dx, dx_scale if dx_scale.numel() else None, first_row=first
                )

        if need_predicted:
            predicted = self._largest_of_all(predicted, largest)
        dw, dw_scale = self._finish_dw(dw) if need_dw else (dw.to(self.leaf_dtype), self._scales(dw, 0, False))
        return ce, z, predicted, logsumexp, Gradients(dx, dw, db.mul_(alpha[0]), dx_scale, dw_scale)

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
            correct = ((predicted == _row_targets(self.target, self.options["shift"])) & (predicted >= 0)).float()
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

    def _scales(self, like: Tensor, size: int, needed: bool) -> Tensor:
        return like.new_empty((size if needed and like.dtype == torch.float16 else 0,), dtype=torch.float32)

    def _dtype_of_dw_sum(self) -> torch.dtype:
        """That of the leaf where it is as exact as a wider one, or asked for (lean)."""
        exact = self.rows <= self.chunk or self.part.lean
        if self.leaf_dtype == self.part.compute_dtype != torch.float16 and exact:
            return self.leaf_dtype
        return self.part.acc_dtype

    def _finish_dw(self, dw: Tensor) -> tuple[Tensor, Tensor]:
        if self.leaf_dtype == torch.float16:
            return _half_rows(dw)
        return dw.to(self.leaf_dtype), self._scales(dw, 0, False)

    def _target_is_elsewhere(self) -> Tensor:
        """Whether the target is a class of another slice, in the order in which rows are worked on."""
        first, last = self.part.first_class, self.part.first_class + self.weight.shape[0]
        target = _row_targets(self.target, self.options["shift"])
        is_class = (target >= 0) & (target < self.part.num_classes)
        return (is_class & ((target < first) | (target >= last))).index_select(0, self.order)

    def _sum_of_weights(self) -> Tensor:
        weight, first, classes = self.options.get("weight"), self.part.first_class, self.weight.shape[0]
        if weight is None:
            return torch.full((), classes, dtype=self.part.acc_dtype, device=self.input.device)
        total: Tensor = weight[first : first + classes].sum(dtype=torch.float64).to(self.part.acc_dtype)
        return total

    def _largest_of_all(self, predicted: Tensor, largest: Tensor) -> Tensor:
        """The class of the largest logit from the class of each slice's largest: the lowest of equals."""
        here, of_all = largest.unbind()
        candidate = predicted.index_select(0, self.order)
        # Not `here == of_all`: a row with NaN must get some class too.
        candidate.masked_fill_(here < of_all, torch.iinfo(torch.int64).max)
        _all_reduce(candidate, dist.ReduceOp.MIN, self.part.group)
        return torch.empty_like(predicted).index_copy_(0, self.order.long(), candidate)


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
        run = _Run(part, input, linear_weight, linear_bias, target, options)
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
        run = _Run(ctx.part, hidden, linear_weight, linear_bias, target, options)
        ctx.gradients = run(*needed)[-1]
        return upstream
