"""Selections of a fixed size from a mask that lives on the device.

`mask.nonzero()` and `x[mask]` ask the device how many entries are set, and wait for the answer. Here the size of the
result is given, the entries are padded to it, and how many are real stays on the device beside them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from . import _checks
from ._dispatch import make_serializable, raise_refused

Order: TypeAlias = Literal["first", "random"]


class MaskedIndices(NamedTuple):
    """The positions that were selected, what of them is real, and how many there were to select from."""

    indices: Tensor
    """int64 (..., size): the selected positions in ascending order, then fill_value."""
    valid: Tensor
    """bool (..., size): True for the selected positions, which come first."""
    count: Tensor  # type: ignore[assignment]
    """int64 (...): how many entries of the mask are set; what was cut off shows as count > size."""


make_serializable(MaskedIndices)


def masked_indices(
    mask: Tensor,
    size: int,
    *,
    order: Order = "first",
    generator: torch.Generator | None = None,
    seed: int | None = None,
    row_ids: Tensor | None = None,
    scores: Tensor | None = None,
    limit: int | Tensor | None = None,
    fill_value: int = 0,
) -> MaskedIndices:
    """The positions at which each row of a mask is set, a fixed number of them, without waiting for the device.

    Of each row min(count, size, limit) positions are kept, count being the number of entries that are set. The shapes
    of the results depend on no data. A row with nothing set has valid False everywhere and count 0; what is computed
    from padding has to be masked with `valid`, and divisors clamped to 1. With the default fill_value a gather along
    the last dimension stays in range, as long as that has an entry at all.

    order "random" keeps the positions with the smallest keys; ties go to the lower position, as in a stable sort, so
    exactly min(count, size, limit) are kept whatever the keys. The keys come from one of

    - `generator` (or torch's default one): one draw of float32 `torch.rand` in the shape of mask, whatever it holds.
      That is sampling without replacement, uniform up to ties among 2^24 values, which favour the lower position.
      Padding the mask or adding rows to it changes what a row gets.
    - `seed` with `row_ids`: Philox4x32-10 of (seed, row id, position) (Salmon et al., Parallel random numbers: as easy
      as 1, 2, 3; SC 2011), 32 bits for each position. A row gets the same positions in any batch, under any padding, on
      any rank, on the CPU as on CUDA.
    - `scores`: your own. E / w with E exponential and w a weight samples without replacement in proportion to w; the
      negative of a quality keeps the best.

    The kernel is `torch.ops.syncfree.masked_indices`: one launch for each call, beside the draw. It never waits for the
    device, can be captured in a CUDA graph and traced by torch.compile. In a region under activation checkpointing a
    draw from a generator is repeated in backward, which torch takes care of by restoring the state of the generator.

    Args:
        mask: (..., L), bool, at least one dimension, fewer than 2^32 columns.
        size: how many positions each row gets, 0 or more; more than L pads.
        order: "first" keeps the first positions, "random" those with the smallest keys.
        generator: source of the keys, on the device of mask. Only with "random".
        seed: of keys from a counter, any int64. Only with "random".
        row_ids: int64 (...), the number that stands for each row beside seed. None: 0, 1, ... over all rows. Only with
            seed.
        scores: (..., L), float32, bfloat16, float16 or float64: the keys. NaN comes last. Not differentiated. Only with
            "random".
        limit: a further bound on what is kept: a number of 0 or more, or an integer tensor that broadcasts to (...) on
            the device of mask, where a negative entry counts as 0. `(mask.sum(-1).max() - 1).clamp(1, size)` repeats
            the rule "one less than the fullest row has".
        fill_value: what stands in `indices` behind the selected positions.

    Returns:
        MaskedIndices(indices, valid, count).

    Raises:
        TypeError: an argument has the wrong type or dtype, or is a DTensor.
        ValueError: a shape, device or value does not fit, or arguments exclude each other.
    """
    name = "syncfree_ext.masked_indices"
    _checks.check_tensor(name, "mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"{name}: mask must be bool, got {mask.dtype} (compare it: mask > 0.5, mask != 0)")
    if mask.dim() == 0:
        raise ValueError(f"{name}: mask must have at least one dimension, got shape ()")
    _checks.check_at_least(name, "size", size, 0)
    _checks.check_integer(name, "fill_value", fill_value)
    if order not in ("first", "random"):
        raise ValueError(f"{name}: order must be 'first' or 'random', got {order!r}")
    sources = {"generator": generator, "seed": seed, "scores": scores}
    given = [key for key, value in sources.items() if value is not None]
    if order == "first" and (given or row_ids is not None):
        raise ValueError(f"{name}: {(given or ['row_ids'])[0]} needs order='random', got order='first'")
    if len(given) > 1:
        raise ValueError(f"{name}: expected one of generator, seed and scores, got {' and '.join(given)}")
    if row_ids is not None and seed is None:
        raise ValueError(f"{name}: row_ids needs a seed, got seed=None")

    rows = mask.shape[:-1]
    if seed is not None:
        _checks.check_integer(name, "seed", seed)
        if row_ids is not None:
            _check_integers(name, "row_ids", row_ids, mask)
            _checks.check_shape(name, "row_ids", row_ids, rows, "that of mask without its last dimension")
            row_ids = row_ids.to(torch.int64).contiguous()
    keys = scores
    if scores is not None:
        _checks.check_tensor(name, "scores", scores)
        _checks.check_floating(name, "scores", scores)
        _checks.check_device(name, "scores", scores, mask.device)
        _checks.check_shape(name, "scores", scores, mask.shape, "that of mask")
        keys = scores.detach()
    elif order == "random" and seed is None:
        keys = torch.rand(mask.shape, generator=generator, dtype=torch.float32, device=mask.device)

    max_kept = None
    if isinstance(limit, Tensor):
        _check_integers(name, "limit", limit, mask)
        try:
            limit = limit.to(torch.int64).expand(rows).contiguous()
        except RuntimeError:
            raise ValueError(
                f"{name}: limit must broadcast to {tuple(rows)}, the shape of mask without its last dimension, got "
                f"{tuple(limit.shape)}"
            ) from None
    elif limit is not None:
        _checks.check_at_least(name, "limit", limit, 0)
        max_kept, limit = limit, None
    try:
        chosen = torch.ops.syncfree.masked_indices(
            mask,
            size,
            keys=keys,
            seed=seed,
            row_ids=row_ids,
            limit=limit,
            max_kept=max_kept,
            fill_value=fill_value,
        )
    except RuntimeError as error:
        raise_refused(error)
        raise
    return MaskedIndices(*chosen)


def _check_integers(function: str, name: str, tensor: Tensor, mask: Tensor) -> None:
    _checks.check_tensor(function, name, tensor)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise TypeError(f"{function}: {name} must hold integers, got {tensor.dtype}")
    _checks.check_device(function, name, tensor, mask.device)


def host_count_bound(mask: Tensor, size: int, multiple: int = 1) -> int:
    """The size that `masked_indices` needs for a mask that is still on the host: exact, and no padding beyond it.

    Call it on the CPU mask before that is copied to the device, and pass the result as `size`. Rounding up keeps the
    number of different sizes, hence of recompilations and of allocations of new sizes, small.

    Args:
        mask: (..., L), bool, on the CPU.
        size: the largest result, 0 or more.
        multiple: the result is rounded up to a multiple of it, 1 or more, but not beyond size.

    Returns:
        min(size, the largest count of a row, rounded up); 0 if nothing is set.

    Raises:
        TypeError: mask is no bool tensor, or size or multiple no integer.
        ValueError: mask is on another device, where counting would wait for it, or size or multiple is out of range.
    """
    name = "syncfree_ext.host_count_bound"
    _checks.check_tensor(name, "mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"{name}: mask must be bool, got {mask.dtype} (compare it: mask > 0.5, mask != 0)")
    if mask.device.type != "cpu":
        raise ValueError(
            f"{name}: mask must be on the CPU, got {mask.device}; reading a count from there would wait for the device"
        )
    if mask.dim() == 0:
        raise ValueError(f"{name}: mask must have at least one dimension, got shape ()")
    _checks.check_at_least(name, "size", size, 0)
    _checks.check_at_least(name, "multiple", multiple, 1)
    largest = int(mask.sum(-1).max()) if mask.numel() else 0
    return min(size, -(-largest // multiple) * multiple)
