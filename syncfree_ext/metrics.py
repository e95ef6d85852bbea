"""Metrics that are added up on the device in every step and read once in a log interval."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from . import _checks
from ._slots import COLUMNS, check_storable, is_capturing, resolve_device
from .scalars import AsyncScalars

Reduction: TypeAlias = Literal["sum", "mean", "last", "min", "max", "ratio"]
Scalar: TypeAlias = "Tensor | float | int"
Metric: TypeAlias = "Scalar | tuple[Scalar, Scalar]"

_NAME = "syncfree_ext.MetricBuffer"
_REDUCTIONS = ("sum", "mean", "last", "min", "max", "ratio")
# Attributes that a copy does not take over.
_MADE_ANEW = {"group", "_agreed", "_captured", "_slots", "_staged", "_state", "_last", "_layout", "_neutral"}

_publish = torch.ops.syncfree.publish_.default


class _Layout(NamedTuple):
    """The columns of each name. Sections: sums, minima, maxima, last values; a section is one operation."""

    first: dict[str, int]  # value, numerator
    second: dict[str, int]  # denominator of a ratio
    counts: dict[str, int]  # how many times a name was added
    sums: int  # columns of the first section: sum, mean, ratio, and all counts
    minima: int
    maxima: int
    total: int


class MetricBuffer:
    """Sums, means, ratios and extremes on the device, in float64; the host reads them when it wants to log.

        metrics = MetricBuffer("cuda", {"accuracy": "ratio", "grad_norm": "max"})
        for step, batch in enumerate(loader):
            ...
            metrics.add(loss=loss, accuracy=(correct, total), grad_norm=grad_norm)
            if (step + 1) % 100 == 0:
                log(step, metrics.compute())

    An `add` is one kernel that takes all values as they are now, in the order of the current stream, and at most three
    that accumulate, however many metrics there are. Numbers travel as arguments of the kernel: nothing is uploaded and
    nothing is read. It can be captured in a CUDA graph, whose replays then count, a number being baked in.

    Over the adds since the last reset, and over the ranks of group, a metric is reduced as

    - "sum", "mean": of all values; "mean" weighs each add alike;
    - "min", "max": of all values; NaN if one of them is;
    - "last": of the last value of each rank, the mean over the ranks that have one;
    - "ratio": of pairs (numerator, denominator), the sums of both, divided once.

    A name that was never added gives 0 for "sum", otherwise NaN, and a ratio whose denominators sum to 0 gives
    ratio_default.

    Args:
        device: "cpu", or a CUDA device.
        reductions: names and how to reduce each.
        default: how to reduce names that `add` brings and reductions does not list.
        group: the ranks to reduce over: torch.distributed.group.WORLD for all. compute, compute_async and
            agree are then collective: every rank calls them at the same steps. None: this process alone.
        ratio_default: the value of a ratio without a denominator.

    Raises:
        ValueError: device is neither, or a reduction is unknown.
    """

    def __init__(
        self,
        device: torch.device | str | int,
        reductions: Mapping[str, Reduction] | None = None,
        *,
        default: Reduction = "mean",
        group: dist.ProcessGroup | None = None,
        ratio_default: float = math.nan,
    ) -> None:
        self.device = resolve_device(_NAME, device)
        self.group = group
        self.default = _checked_reduction("default", default)
        self.ratio_default = float(ratio_default)
        self._reductions: dict[str, Reduction] = {
            name: _checked_reduction(name, reduction) for name, reduction in (reductions or {}).items()
        }
        self._agreed = False
        self._captured = False
        self._lay_out()

    @property
    def reductions(self) -> dict[str, Reduction]:
        """Names and reductions known so far."""
        return dict(self._reductions)

    # ------------------------------------------------------------------------------------------------------ accumulate

    @torch.no_grad()
    def add(self, /, **metrics: Metric) -> None:
        """Accumulate values, as they are now in the order of the current stream. Never waits.

        Args:
            metrics: name to a tensor with one element (floating but not float8, signed, uint8 or bool) or a number; for
                "ratio" to a pair of them. A tensor on the CPU counts as a number. Gradients are not tracked.

        Raises:
            TypeError: a value is of the wrong type, a ratio no pair, or another metric a pair.
            ValueError: a tensor has more than one element or is on another CUDA device; or the name is new after the
                ranks have agreed on names.
            RuntimeError: the name is new, and a CUDA graph has captured an add or is about to.
        """
        self._captured = self._captured or is_capturing(self.device)
        new = [name for name in metrics if name not in self._reductions]
        if new:
            self._extend(new)
        layout = self._layout
        numbers = list(self._neutral)
        tensors: list[Tensor] = []
        columns: list[int] = []
        last_columns: list[int] = []
        last_numbers: list[float] = []

        def take(name: str, column: int, value: object) -> None:
            scalar = self._scalar(name, value)
            if isinstance(scalar, Tensor):
                tensors.append(scalar)
                columns.append(column)
            elif column < len(numbers):
                numbers[column] = scalar
                return
            else:
                last_columns.append(column)
                last_numbers.append(scalar)

        for name, value in metrics.items():
            if isinstance(value, tuple) != (self._reductions[name] == "ratio"):
                raise TypeError(
                    f"{_NAME}.add: {name} is reduced by {self._reductions[name]!r} and must be "
                    f"{'one value' if isinstance(value, tuple) else 'a pair (numerator, denominator)'}"
                )
            numbers[layout.counts[name]] = 1.0
            if isinstance(value, tuple):
                if len(value) != 2:
                    raise TypeError(f"{_NAME}.add: {name} must be a pair (numerator, denominator), got {len(value)}")
                take(name, layout.first[name], value[0])
                take(name, layout.second[name], value[1])
            else:
                take(name, layout.first[name], value)

        from_tensors = set(columns)
        rest = [column for column in range(len(numbers)) if column not in from_tensors]
        with torch._C._AutoDispatchBelowADInplaceOrView():
            _publish(
                self._slots,
                tensors,
                columns + rest + last_columns,
                [numbers[column] for column in rest] + last_numbers,
                first_integer_column=layout.total,
                ticket=1,
            )
        self._accumulate(self._staged)

    def _scalar(self, name: str, value: object) -> Tensor | float:
        if isinstance(value, Tensor):
            _checks.check_tensor(f"{_NAME}.add", name, value)
            check_storable(f"{_NAME}.add", name, value)
            if value.numel() != 1:
                raise ValueError(f"{_NAME}.add: {name} must have one element, got shape {tuple(value.shape)}")
            if value.is_cpu and self.device.type != "cpu":
                return float(value.item())
            if value.device != self.device:
                raise ValueError(f"{_NAME}.add: {name} must be on {self.device} or the CPU, got {value.device}")
            return value
        if not isinstance(value, (int, float, numbers.Real)):
            raise TypeError(
                f"{_NAME}.add: {name} must be a number or a tensor with one element, got {type(value).__name__}"
            )
        return float(value)

    def _accumulate(self, staged: Tensor) -> None:
        sums, minima, maxima = self._sections(self._state)
        new_sums, new_minima, new_maxima = self._sections(staged)
        sums.add_(new_sums)
        # NaN wins in both.
        if minima.numel():
            torch.minimum(minima, new_minima, out=minima)
        if maxima.numel():
            torch.maximum(maxima, new_maxima, out=maxima)

    # ----------------------------------------------------------------------------------------------------------- layout

    @torch.inference_mode(False)  # a name may come up in an evaluation, and be added to in training
    def _lay_out(self) -> None:
        """Columns and memory for the names that are known."""
        kinds = self._reductions.items()
        first: dict[str, int] = {}
        second: dict[str, int] = {}
        count: dict[str, int] = {}
        column = 0
        for name, kind in kinds:
            if kind in ("sum", "mean", "ratio"):
                first[name], column = column, column + 1
            if kind == "ratio":
                second[name], column = column, column + 1
            count[name], column = column, column + 1
        ends = [column]
        for wanted in ("min", "max", "last"):
            for name, kind in kinds:
                if kind == wanted:
                    first[name], column = column, column + 1
            ends.append(column)
        self._layout = _Layout(first, second, count, ends[0], ends[1] - ends[0], ends[2] - ends[1], column)
        layout = self._layout
        self._neutral = [0.0] * layout.sums + [math.inf] * layout.minima + [-math.inf] * layout.maxima
        self._slots = torch.zeros(1, COLUMNS + column, dtype=torch.int64, device=self.device)
        # The last values are where the kernel puts them; of the others the row holds those of one add.
        self._staged = self._slots[0, COLUMNS:].view(torch.float64)
        self._state = torch.empty(len(self._neutral), dtype=torch.float64, device=self.device)
        self._last = self._staged[len(self._neutral) :]
        self.reset()

    def _sections(self, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums, minima, maxima."""
        sizes = [self._layout.sums, self._layout.minima, self._layout.maxima]
        sums, minima, maxima = columns[: len(self._neutral)].split(sizes)
        return sums, minima, maxima

    def _extend(self, names: list[str]) -> None:
        if self._agreed:
            raise ValueError(
                f"{_NAME}.add: the ranks have agreed on the names {sorted(self._reductions)}; list {names} in "
                "reductions, or add them before the first compute"
            )
        self._move_to(self._reductions | dict.fromkeys(names, self.default))

    def _move_to(self, reductions: dict[str, Reduction]) -> None:
        """Keep what was accumulated, in the columns of other names or another order."""
        if self._captured:
            raise RuntimeError(
                f"{_NAME}: the names {list(self._reductions)} are fixed since a CUDA graph captured an add, and before "
                f"that by agree(); got {list(reductions)}"
            )
        old = self.state_dict()
        self._reductions = reductions
        self._lay_out()
        self._restore(old)

    def reset(self) -> None:
        """Start a new interval. Never waits."""
        sums, minima, maxima = self._sections(self._state)
        sums.zero_()
        minima.fill_(math.inf)
        maxima.fill_(-math.inf)
        self._last.zero_()

    # ------------------------------------------------------------------------------------------------------------- read

    def agree(self) -> None:
        """Check that all ranks of the group have the same names and reductions. Waits.

        Called by the first compute or compute_async. Afterwards no new names are accepted, because the packed
        reductions of the ranks would not match.

        Raises:
            ValueError: on every rank, if they differ.
        """
        if self._agreed or self.group is None:
            return
        mine = sorted(self._reductions.items())
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, mine, group=self.group)
        odd = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        if odd:
            raise ValueError(
                f"{_NAME}: expected the same names and reductions on every rank, got {everyone[0]} on rank 0 of the "
                f"group and {everyone[odd[0]]} on rank {odd[0]}"
            )
        # In one order, whatever the order in which names came.
        if list(self._reductions.items()) != mine:
            self._move_to(dict(mine))
        self._agreed = True

    @torch.no_grad()
    def reduced(self) -> dict[str, Tensor]:
        """The metrics of the interval over all ranks, as 0-D float64 tensors on the device; nothing is reset.

        Collective with a group: one all_reduce of all sums and one of all extremes, if there are any. Waits for the
        device the first time alone, to agree on names.
        """
        self.agree()
        layout = self._layout
        sums, minima, maxima = self._sections(self._state.clone())
        last = self._last.clone()
        if self.group is not None:
            sums, minima, maxima, last = self._reduce(sums, minima, maxima, last)
        extremes_start, last_start = layout.sums, len(self._neutral)
        extremes = torch.cat((minima, maxima))
        results: dict[str, Tensor] = {}
        for name, kind in self._reductions.items():
            column, count = layout.first[name], sums[layout.counts[name]]
            if kind == "sum":
                results[name] = sums[column]
            elif kind == "mean":
                results[name] = sums[column] / count  # 0 / 0 is NaN
            elif kind == "ratio":
                denominator = sums[layout.second[name]]
                ratio = sums[column] / denominator
                results[name] = ratio.masked_fill_(denominator == 0, self.ratio_default)
            elif kind == "last":
                results[name] = last[column - last_start].masked_fill(count == 0, math.nan)
            else:
                results[name] = extremes[column - extremes_start].masked_fill(count == 0, math.nan)
        return results

    def _reduce(
        self, sums: Tensor, minima: Tensor, maxima: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Over the ranks. A maximum loses NaN in some backends, so NaN travels as a count."""
        lasts = [name for name, kind in self._reductions.items() if kind == "last"]
        counts = [self._layout.counts[name] for name in lasts]
        has = torch.stack([sums[column] for column in counts]).gt(0).double() if lasts else last
        extremes = torch.cat((minima.neg(), maxima))
        nans = extremes.isnan()
        pack = torch.cat((sums, last * has if lasts else last, has, nans.double()))
        dist.all_reduce(pack, dist.ReduceOp.SUM, group=self.group)
        sums, last, has, bad = pack.split([sums.numel(), last.numel(), has.numel(), nans.numel()])
        if extremes.numel():
            extremes = extremes.masked_fill(nans, -math.inf)
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.group)
            extremes = extremes.masked_fill(bad > 0, math.nan)
        return sums, extremes[: minima.numel()].neg(), extremes[minima.numel() :], last / has

    def compute(self, *, reset: bool = True) -> dict[str, float]:
        """The metrics of the interval, over all ranks, as numbers. Waits for the device, once.

        Args:
            reset: start a new interval.

        Raises:
            ValueError: the first time, if the ranks have different names.
        """
        results = self.reduced()
        values = torch.stack(list(results.values())).tolist() if results else []
        if reset:
            self.reset()
        return dict(zip(results, values, strict=True))

    def compute_async(self, scalars: AsyncScalars, tag: Any, *, reset: bool = True) -> None:
        """Send the metrics of the interval through a ring; they come out of its poll under the tag.

        Does not wait, except the first time with a group, to agree on names, and as the ring does when it is full.

        Args:
            scalars: a ring on the same device that has all the names.
            tag: comes back with the values.
            reset: start a new interval.

        Raises:
            KeyError: the ring lacks a name.
            ValueError: the ring is on another device; or the first time, if the ranks have different names.
        """
        if scalars.device != self.device:
            raise ValueError(f"{_NAME}.compute_async: scalars must be on {self.device}, got {scalars.device}")
        scalars.put(tag, self.reduced())
        if reset:
            self.reset()

    # ------------------------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Reductions, and for each name a float64 tensor (value or numerator, denominator, count) on the device.

        Of this rank alone. Does not wait.
        """
        layout = self._layout
        state = torch.cat((self._state, self._last))
        zero = state.new_zeros(())
        values = {
            name: torch.stack(
                (
                    state[layout.first[name]],
                    state[layout.second[name]] if name in layout.second else zero,
                    state[layout.counts[name]],
                )
            )
            for name in self._reductions
        }
        return {"reductions": dict(self._reductions), "values": values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what state_dict returned, in place of what is there.

        Raises:
            ValueError: a name is reduced in another way here, or is new after the ranks have agreed on names.
        """
        theirs = state["reductions"]
        clash = [name for name in theirs if self._reductions.get(name, theirs[name]) != theirs[name]]
        if clash:
            raise ValueError(
                f"{_NAME}.load_state_dict: {clash[0]} is reduced by {self._reductions[clash[0]]!r} here, got "
                f"{theirs[clash[0]]!r}"
            )
        new = {name: _checked_reduction(name, kind) for name, kind in theirs.items() if name not in self._reductions}
        if new and self._agreed:
            raise ValueError(f"{_NAME}.load_state_dict: expected the names {sorted(self._reductions)}, got {list(new)}")
        self.reset()
        if new:
            self._move_to(self._reductions | new)
        self._restore(state)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, copy and torch.save: what was accumulated, without memory that a captured graph writes to."""
        if self.group is not None:
            raise TypeError(f"{_NAME}: a buffer with a process group cannot be copied; take its state_dict()")
        kept = {name: value for name, value in self.__dict__.items() if name not in _MADE_ANEW}
        return {"attributes": kept, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["attributes"], group=None, _agreed=False, _captured=False)
        self._reductions = dict(self._reductions)
        for value in state["state"]["values"].values():
            self.device = value.device  # where torch.load has put it
        self._lay_out()
        self._restore(state["state"])

    def _restore(self, state: Mapping[str, Any]) -> None:
        layout = self._layout
        for name, values in state["values"].items():
            first, second, count = values.to(self.device, torch.float64, non_blocking=True)
            target = self._staged if self._reductions[name] == "last" else self._state
            target[layout.first[name]].copy_(first)
            if name in layout.second:
                self._state[layout.second[name]].copy_(second)
            self._state[layout.counts[name]].copy_(count)


def _checked_reduction(name: str, reduction: Any) -> Reduction:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{_NAME}: {name} must be reduced by one of {_REDUCTIONS}, got {reduction!r}")
    return reduction  # type: ignore[no-any-return]
