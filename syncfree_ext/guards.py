"""NaN and infinity, found without waiting for the device, and attributed to the step in which they appeared."""

from __future__ import annotations

import math
import sys
from collections import deque
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from . import _checks
from ._slots import COLUMNS, Lane, is_capturing, wait_until
from .scalars import AsyncScalars, _captured_memory

Group: TypeAlias = "dist.ProcessGroup | None"

_NAME = "syncfree_ext.NonFiniteGuard"
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc, torch.jagged)

_publish = torch.ops.syncfree.publish_.default


class NonFiniteError(FloatingPointError):
    """A guarded value was NaN or infinite.

    Attributes:
        step: the first step with such a value.
        count: how many steps with one had been seen when this was found.
    """

    def __init__(self, step: int, count: int) -> None:
        super().__init__(
            f"a guarded value was NaN or infinite in step {step}; {count} such step(s) by the time it was found"
        )
        self.step = step
        self.count = count

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.count)


class NonFiniteGuard:
    """Watches values for NaN and infinity; raises late by a fixed number of steps, but names the right one.

        guard = NonFiniteGuard(ring)
        for step, batch in enumerate(loader):
            ...
            guard.update(step, loss, grad_norm)
            if step % 1000 == 0:
                guard.check()  # before a checkpoint: poisoned weights are never saved
                save(...)

    Three numbers stay on the device: the first bad step, how many there were, and with them whether there was any. Each
    update sends them to the host, in a lane of the ring's own kind and depth. An update looks at what the update depth
    calls earlier sent, waiting if it has to, so with a bad value in step s it is the update of step s + depth that
    raises: on every rank, whatever the timing. A ring that is left without an exception checks its guards.

    In a CUDA graph `update` is repeated by each replay, and nothing on the host runs: the step is the captured one
    plus the number of the replay, which is counted on the device. Then ask `poll()`, which never waits, or `check()`.

    To keep a bad step from being applied at all, without waiting, multiply the gradients by a flag on the device, or
    give a fused optimizer a found_inf tensor as torch.amp.GradScaler does; step counters and schedules then run on.

    Args:
        scalars: gives the device and the depth, and checks this guard when it is left.
        group: with one (torch.distributed.group.WORLD for all ranks), a value that is bad on one rank is bad on all: a
            MAX reduction of one number at each update, in stream order with NCCL. Every rank then has to call update
            and check at the same steps. None: this process alone.

    Raises:
        TypeError: scalars is no AsyncScalars.
        RuntimeError: a CUDA graph is being captured.
    """

    def __init__(self, scalars: AsyncScalars, group: Group = None) -> None:
        if not isinstance(scalars, AsyncScalars):
            raise TypeError(f"{_NAME}: scalars must be an AsyncScalars, got {type(scalars).__name__}")
        self.device, self.depth, self.group = scalars.device, scalars.depth, group
        if is_capturing(self.device):
            raise RuntimeError(f"{_NAME}: expected to be made before the capture of a CUDA graph, got a capture")
        self._lane = Lane(self.device, self.depth, 2, 0)
        self._replays = Lane(self.device, self.depth, 2, 0)
        with torch.inference_mode(False):
            self._counters = torch.zeros(2, dtype=torch.int64, device=self.device)
            self._first = torch.zeros((), dtype=torch.int64, device=self.device)  # meaningless while count is 0
            self._count = torch.zeros((), dtype=torch.int64, device=self.device)
        self._pending: deque[tuple[int, int]] = deque()
        self._tickets = 0
        self._captured = False
        self._forgotten = 0  # the last replay before a reset
        self._error: NonFiniteError | None = None
        scalars._at_exit.append(self.check)

    def __del__(self) -> None:
        """Hand the memory of the lanes on, which is never freed; not what something may still be on its way to."""
        pending = getattr(self, "_pending", None)
        if pending is None or sys.is_finalizing() or not self._lane.is_own:
            return  # it was never whole, or there is no later object to hand it to
        while pending and self._lane.end(pending[0][0]) == pending[0][0]:
            pending.popleft()
        if not pending:
            self._lane.recycle()
        if not self._captured:
            self._replays.recycle()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(f"{_NAME}: a guard holds memory that the device writes to, and cannot be copied or pickled")

    @torch.no_grad()
    def update(self, step: int, *tensors: Tensor | float) -> None:
        """Look at the values of a step, on the device, in the order of the current stream.

        Waits only when what the update depth calls earlier sent has not arrived yet.

        Args:
            step: its number, any integer.
            tensors: what has to be finite: floating tensors of any shape on the device, tensors on the CPU, or numbers.
                Of sparse tensors the values that are stored. Integers are finite; none at all is fine. Gradients are
                not tracked.

        Raises:
            NonFiniteError: the step depth updates earlier was bad, or this was found before.
            TypeError: an argument has the wrong type.
            ValueError: a tensor is on another CUDA device.
        """
        _checks.check_integer(_NAME + ".update", "step", step)
        stream = self._lane.stream()
        capturing = stream is None
        if not capturing:
            self._raise_known()
            if len(self._pending) == self.depth:
                self._look_at_oldest()
        bad = self._is_bad(tensors)
        if self.group is not None:
            flag = bad.to(torch.int64)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
            bad = flag.to(torch.bool)
        is_first = self._count.eq(0).logical_and_(bad)
        if capturing:  # counters[1] counts the replays so far; masked_fill_ would read a tensor on the host
            self._first.copy_(torch.where(is_first, self._counters[1] + step, self._first))
        else:
            self._first.masked_fill_(is_first, step)
        self._count.add_(bad)
        if stream is None:
            self._publish_captured()
            return
        self._tickets += 1
        self._lane.publish([self._first, self._count], [0, 1], ticket=self._tickets)
        self._pending.append((self._tickets, stream))

    def poll(self) -> None:
        """Raise if what has arrived so far is bad. Never waits.

        Ranks may find out at different calls; where all have to raise together, leave it to update and check.

        Raises:
            NonFiniteError: a step was bad.
        """
        while self._pending and self._lane.end(self._pending[0][0]) == self._pending[0][0]:
            self._look_at_oldest()
        if self._captured:
            newest = max(self._replays.end(ticket) for ticket in range(1, self.depth + 1))
            row = self._replays.read(newest) if newest > self._forgotten else None
            if row is not None:  # else it is being overwritten: the next call sees it
                self._note(row)
        self._raise_known()

    def check(self) -> None:
        """Wait for all updates so far, and raise if one was bad. For use before a checkpoint, and at the end.

        Raises:
            NonFiniteError: a step was bad.
        """
        while self._pending:
            self._look_at_oldest()
        if self._captured:
            torch.cuda.synchronize(self.device)  # a replay may be on any stream
            self.poll()
        self._raise_known()

    def reset(self) -> None:
        """Forget what was found, so that training can go on from a checkpoint."""
        while self._pending:
            ticket, stream = self._pending.popleft()
            self._wait(ticket, stream)
        if self._captured:
            torch.cuda.synchronize(self.device)
            self._forgotten = self._replays.newest()
        self._count.zero_()
        self._error = None

    def _is_bad(self, tensors: tuple[Tensor | float, ...]) -> Tensor:
        """A bool on the device: one of them is not finite."""
        on_device: list[Tensor] = []
        bad_on_host = False
        for index, value in enumerate(tensors):
            if not isinstance(value, Tensor):
                _checks.check_number(_NAME + ".update", f"tensors[{index}]", value)
                bad_on_host |= not math.isfinite(value)
                continue
            if value.layout is torch.sparse_coo:
                value = value._values()  # values() would need a coalesced tensor, and to coalesce waits
            elif value.layout in _COMPRESSED:
                value = value.values()
            _checks.check_tensor(_NAME + ".update", f"tensors[{index}]", value)
            if value.dtype.is_complex:
                value = torch.view_as_real(value.resolve_conj())
            elif value.dtype.is_floating_point and value.dtype.itemsize == 1:
                value = value.to(torch.float32)  # float8 has no arithmetic
            if not value.dtype.is_floating_point or value.numel() == 0:
                continue
            if value.is_cpu and self.device.type == "cuda":
                bad_on_host |= not bool(value.isfinite().all())
                continue
            _checks.check_device(_NAME + ".update", f"tensors[{index}]", value, self.device)
            on_device.append(value.detach())
        if bad_on_host or not on_device:
            return torch.full((), bad_on_host, dtype=torch.bool, device=self.device)
        # The largest magnitude: it keeps NaN and infinity, and cannot overflow as a sum would.
        scalars = [t if t.numel() == 1 else torch.linalg.vector_norm(t, math.inf) for t in on_device]
        if len(scalars) > 1:
            # All into one tensor, whatever their dtypes, by one kernel.
            slots = torch.empty(1, COLUMNS + len(scalars), dtype=torch.int64, device=self.device)
            with torch._C._AutoDispatchBelowADInplaceOrView():
                _publish(slots, scalars, range(len(scalars)), [], first_integer_column=len(scalars), ticket=1)
            worst = slots[0, COLUMNS:].view(torch.float64)
        else:
            worst = scalars[0]
        return (worst - worst).ne(0).any()  # x - x is 0 for finite x, and NaN for all others

    def _publish_captured(self) -> None:
        if not self._captured:
            _captured_memory.append((self._replays, self._counters, self._first, self._count))
            self._captured = True
        self._replays.publish([self._first, self._count], [0, 1], counters=self._counters)

    def _wait(self, ticket: int, stream: int) -> None:
        wait_until(lambda: self._lane.end(ticket) == ticket, self._lane.as_stream(stream), None)

    def _look_at_oldest(self) -> None:
        ticket, stream = self._pending[0]
        self._wait(ticket, stream)
        row = self._lane.read(ticket)
        assert row is not None  # nobody writes to the row before the entry is gone
        self._pending.popleft()
        self._note(row)
        self._raise_known()

    def _note(self, row: tuple[Any, ...]) -> None:
        step, count = row[COLUMNS:]
        if count and self._error is None:
            self._error = NonFiniteError(step, count)

    def _raise_known(self) -> None:
        if self._error is not None:
            raise NonFiniteError(self._error.step, self._error.count)
