"""What a rank does with a chunk of rows between the driver's collectives, on the general path and on the Hopper path.

Both keep what passes from one op to the next, so that the driver is the same for either. Collectives of a few numbers a
row are made here, through `run.all_reduce`; that of dX is the driver's, as it runs beside `weight_gradient`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from ._vocab_parallel import Run

_syncfree = torch.ops.syncfree

# A slot of counts (csrc/common/params.h).
_COUNT_CLASSES = 2


class Needs(NamedTuple):
    """What one pass over all rows is to give."""

    dx: bool
    dw: bool
    db: bool
    predicted: bool
    logsumexp: bool


class Gradients(NamedTuple):
    """As those of `flce_forward`, dw and db of this slice."""

    dx: Tensor
    dw: Tensor
    db: Tensor
    dx_scale: Tensor
    dw_scale: Tensor


class Results(NamedTuple):
    """Of one pass: the parts of the loss of each row, undivided, and the gradients. Shape [0] where not needed."""

    ce: Tensor
    z: Tensor
    predicted: Tensor
    logsumexp: Tensor
    gradients: Gradients


class _Chunks:
    """What both paths allocate."""

    def __init__(self, run: Run, need: Needs) -> None:
        self.run, self.need = run, need
        acc, rows = run.part.acc_dtype, run.rows
        self.ce, self.z = run.input.new_empty((2, rows), dtype=acc).unbind()
        self.logsumexp = run.input.new_empty((rows if need.logsumexp else 0,), dtype=acc)
        self.predicted = run.input.new_empty((rows if need.predicted else 0,), dtype=torch.int64)
        self.dx = run.input.new_empty((rows, run.input.shape[1]) if need.dx else (0,))

    def _largest_of_all(self, here: Tensor, of_all: Tensor) -> Tensor:
        """The class of the largest logit from the class of each slice's largest: the lowest of equals.

        here, of_all: the largest logit of this slice and of all, in the order in which rows are worked on.
        """
        candidate = self.predicted.index_select(0, self.run.order)
        # Not `here == of_all`: a row with NaN must get some class too.
        candidate.masked_fill_(here < of_all, torch.iinfo(torch.int64).max)
        self.run.all_reduce(candidate, dist.ReduceOp.MIN)
        return torch.empty_like(self.predicted).index_copy_(0, self.run.order.long(), candidate)


class GeneralChunks(_Chunks):
    """Every device, dtype and option: float32 logits, and a row kernel that turns them into their gradient."""

    def __init__(self, run: Run, need: Needs) -> None:
        super().__init__(run, need)
        acc = run.part.acc_dtype
        classes, hidden = run.weight.shape
        # The largest logit of this slice and of all, in the order in which rows are worked on.
        self.largest = run.input.new_empty((2, run.rows if need.predicted else 0), dtype=acc)
        self.dx_scale = _scales(self.dx, run.rows, need.dx)
        self.dw = run.weight.new_empty((classes, hidden) if need.dw else (0,), dtype=self._dtype_of_dw_sum())
        self.db = run.weight.new_empty((classes if need.db else 0,), dtype=acc)
        self.alpha = run.input.new_ones((3,), dtype=acc)
        if run.rows == 0:
            self.dw.zero_()
            self.db.zero_()
        self.absent = self._target_is_elsewhere()
        self.classes_here, self.classes = self._sum_of_weights(), run.counts[_COUNT_CLASSES].to(acc)

    def logits(self, first: int) -> None:
        """The logits of the slice, and the statistics of all classes."""
        run, need = self.run, self.need
        here = slice(first, min(first + run.chunk, run.rows))
        self._gathered, self._logits, stats = _syncfree.flce_shard_logits.default(
            run.input,
            run.weight,
            run.target,
            run.counts,
            run.order,
            run.bias,
            first_row=first,
            chunk_rows=here.stop - first,
            predicted_tokens=self.predicted if need.predicted else None,
            **run.slice,
            **run.options,
        )
        self._stats, largest_here = self._combine(stats, self.absent[here])
        if need.predicted:
            self.largest[0, here] = largest_here
            self.largest[1, here] = torch.maximum(self._stats[:, 0], self._stats[:, 2])

    def gradient(self, first: int) -> Tensor:
        """Losses, the gradient of the logits, and this slice's share of dX."""
        run, need = self.run, self.need
        need_gradient = need.dx or need.dw or need.db
        dx_sum: Tensor
        dx_sum, alpha = _syncfree.flce_shard_gradient.default(
            self._logits,
            self._stats,
            run.weight,
            run.target,
            run.counts,
            run.order,
            self.ce,
            self.z,
            self.logsumexp if need.logsumexp else None,
            run.bias,
            first_row=first,
            need_gradient=need_gradient,
            need_dx=need.dx,
            **run.slice,
            **run.options,
        )
        if need_gradient:
            self.alpha = alpha
        return dx_sum

    def weight_gradient(self, first: int) -> None:
        """Adds to dw and db. The next chunk takes the memory of this one's logits."""
        run, need = self.run, self.need
        if need.dw or need.db:
            _syncfree.flce_shard_weight_gradient.default(
                self._logits,
                self._gathered,
                run.counts,
                run.order,
                self.alpha,
                self.dw if need.dw else None,
                self.db if need.db else None,
                first_row=first,
                accumulate=first > 0,
            )
        del self._logits, self._gathered

    def store_dx(self, first: int, dx_sum: Tensor) -> None:
        """The rows of dx from the sum over all slices."""
        scale = self.dx_scale if self.dx_scale.numel() else None
        _syncfree.flce_shard_store_dx.default(
            dx_sum, self.run.counts, self.run.order, self.alpha, self.dx, scale, first_row=first
        )

    def results(self) -> Results:
        """After the last chunk."""
        predicted = self._largest_of_all(*self.largest.unbind()) if self.need.predicted else self.predicted
        dw, dw_scale = self.dw, _scales(self.dw, 0, False)
        if self.need.dw and self.run.leaf_dtype == torch.float16:
            dw, dw_scale = _half_rows(dw)
        gradients = Gradients(self.dx, dw.to(self.run.leaf_dtype), self.db.mul_(self.alpha[0]), self.dx_scale, dw_scale)
        return Results(self.ce, self.z, predicted, self.logsumexp, gradients)

    def _combine(self, stats: Tensor, absent: Tensor) -> tuple[Tensor, Tensor]:
        """The statistics [n, 4] of all classes from those of each slice, and the largest logit of this slice.

        absent: whether a row's target is a class of another slice. For label smoothing, classes_here and classes are
        the class weights of this slice and of all, summed (C of docs/semantics.md).
        """
        smoothing = self.run.options["label_smoothing"] > 0
        largest, others, own, smooth = stats.unbind(1)
        # Where the target is absent, `own` is the logit that smooth is relative to, one of those among the others.
        largest_here = torch.maximum(largest, own.masked_fill(absent, -torch.inf))
        top = self.run.all_reduce(largest.clone(), dist.ReduceOp.MAX)
        # All others at -inf: any finite base gives their exact sum, 0.
        base = top.masked_fill(top == -torch.inf, 0)
        parts = [others * torch.exp(largest - base), own.masked_fill(absent, 0)]
        if smoothing:
            parts.append(smooth + self.classes_here * (_finite(own) - base))
        sums = self.run.all_reduce(torch.stack(parts), dist.ReduceOp.SUM)
        smooth = sums[2] + self.classes * (base - _finite(sums[1])) if smoothing else sums[0]
        return torch.stack((top, sums[0], sums[1], smooth), 1), largest_here

    def _dtype_of_dw_sum(self) -> torch.dtype:
        """That of the leaf where it is as exact as a wider one, or asked for (lean)."""
        run = self.run
        exact = run.rows <= run.chunk or run.part.lean
        if run.leaf_dtype == run.part.compute_dtype != torch.float16 and exact:
            return run.leaf_dtype
        return run.part.acc_dtype

    def _target_is_elsewhere(self) -> Tensor:
        """Whether the target is a class of another slice, in the order in which rows are worked on."""
        run = self.run
        first, last = run.part.first_class, run.part.first_class + run.weight.shape[0]
        target = run.row_targets()
        is_class = (target >= 0) & (target < run.part.num_classes)
        return (is_class & ((target < first) | (target >= last))).index_select(0, run.order)

    def _sum_of_weights(self) -> Tensor:
        run = self.run
        weight, first, classes = run.options.get("weight"), run.part.first_class, run.weight.shape[0]
        if weight is None:
            return torch.full((), classes, dtype=run.part.acc_dtype, device=run.input.device)
        total: Tensor = weight[first : first + classes].sum(dtype=torch.float64).to(run.part.acc_dtype)
        return total


class FusedChunks(_Chunks):
    """The Hopper path: the logits are never stored, and ignored rows cost nothing (docs/kernels.md)."""

    def __init__(self, run: Run, need: Needs) -> None:
        super().__init__(run, need)
        self.input, self.weight = _with_aligned_rows(run.input), _with_aligned_rows(run.weight)
        self.need_gradient = need.dx or need.dw
        self.largest = run.input.new_empty((run.rows if need.predicted else 0,), dtype=torch.float32)
        self.target_logits, self.class_rows, self.dw, self.dw_low = _syncfree.flce_shard_fused_begin.default(
            self.input,
            self.weight,
            run.target,
            run.counts,
            run.order,
            chunk_rows=run.chunk,
            weight_dtype=run.leaf_dtype,
            shift=run.options["shift"],
            lean=run.part.lean,
            need_dw=need.dw,
            **run.slice,
        )
        run.all_reduce(self.target_logits, dist.ReduceOp.SUM)
        self.target_gradients = torch.empty_like(self.target_logits)

    def logits(self, first: int) -> None:
        """E of the slice, and the statistics of all classes."""
        run, need = self.run, self.need
        self._gathered, self._e, self._slice_stats = _syncfree.flce_shard_fused_logits.default(
            self.input,
            self.weight,
            run.target,
            run.counts,
            run.order,
            self.target_logits,
            first_row=first,
            chunk_rows=run.chunk,
            need_e=self.need_gradient,
            predicted_tokens=self.predicted if need.predicted else None,
            largest=self.largest if need.predicted else None,
            **run.slice,
            **run.options,
        )
        self._stats = self._combine(self._slice_stats)

    def gradient(self, first: int) -> Tensor:
        """Losses, the factors of E, and this slice's share of dX."""
        run, need = self.run, self.need
        dx_sum: Tensor
        dx_sum, self._v = _syncfree.flce_shard_fused_gradient.default(
            self._e,
            self._slice_stats,
            self._stats,
            self.weight,
            run.target,
            run.counts,
            run.order,
            self.target_gradients,
            self.ce,
            self.z,
            self.logsumexp if need.logsumexp else None,
            first_row=first,
            need_dx=need.dx,
            **run.slice,
            **run.options,
        )
        return dx_sum

    def weight_gradient(self, first: int) -> None:
        """Adds to dw. The next chunk takes the memory of this one's E."""
        if self.need.dw:
            _syncfree.flce_shard_fused_weight_gradient.default(
                self._e,
                self._gathered,
                self._v,
                self.run.counts,
                self.run.order,
                self.class_rows,
                self.dw,
                self.dw_low,
                first_row=first,
                accumulate=first > 0,
            )
        del self._e, self._gathered

    def store_dx(self, first: int, dx_sum: Tensor) -> None:
        """The rows of dx from the sum over all slices."""
        _syncfree.flce_shard_fused_store_dx.default(dx_sum, self.run.counts, self.run.order, self.dx, first_row=first)

    def results(self) -> Results:
        """After the last chunk."""
        run, predicted = self.run, self.predicted
        if self.need.predicted:
            predicted = self._largest_of_all(self.largest, run.all_reduce(self.largest.clone(), dist.ReduceOp.MAX))
        dw = self.dw
        if self.need.dw:
            in_place = dw.dtype == run.leaf_dtype
            dw = dw if in_place else torch.empty_like(dw, dtype=run.leaf_dtype)
            _syncfree.flce_shard_fused_add_targets.default(
                self.input,
                run.counts,
                run.order,
                self.class_rows,
                self.target_gradients,
                self.dw,
                self.dw_low,
                None if in_place else dw,
            )
        none = run.input.new_empty((0,), dtype=torch.float32)
        return Results(self.ce, self.z, predicted, self.logsumexp, Gradients(self.dx, dw, none, none, none))

    def _combine(self, stats: Tensor) -> Tensor:
        """The statistics [4, n] of all classes from those of each slice."""
        exponent, total, own, residue = stats.unbind()
        top = self.run.all_reduce(exponent.clone(), dist.ReduceOp.MAX)
        # A slice that holds larger logits than the others may have had to take another exponent for a row.
        scale = torch.exp2(exponent - top)
        sums = self.run.all_reduce(torch.stack((total * scale, own, residue * scale)), dist.ReduceOp.SUM)
        return torch.cat((top.unsqueeze(0), sums))


def _finite(logit: Tensor) -> Tensor:
    """What logits are summed relative to (smooth_base of csrc/common/formulas.h)."""
    return torch.where(torch.isfinite(logit), logit, 0)


def _scales(like: Tensor, size: int, needed: bool) -> Tensor:
    return like.new_empty((size if needed and like.dtype == torch.float16 else 0,), dtype=torch.float32)


def _half_rows(sums: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in float16, their largest entries brought to [2^14, 2^15) by powers of two, and what removes these."""
    largest = torch.linalg.vector_norm(sums, torch.inf, dim=1)
    exponent = torch.frexp(largest).exponent
    usable = (largest > 0) & torch.isfinite(largest)
    remove = torch.where(usable, torch.ldexp(torch.ones_like(largest), (exponent - 15).clamp(-126, 126)), 1)
    return sums.div_(remove.unsqueeze(1)).half(), remove.float()


def _with_aligned_rows(matrix: Tensor) -> Tensor:
    """Rows that the kernels can read 16 bytes at a time; a copy where they are not so."""
    aligned = (
        matrix.stride(1) == 1
        and (matrix.shape[0] <= 1 or matrix.stride(0) * matrix.itemsize % 16 == 0)
        and matrix.data_ptr() % 16 == 0
    )
    return matrix if aligned else matrix.clone(memory_format=torch.contiguous_format)
