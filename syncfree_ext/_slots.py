"""Rows of memory that the device writes and the host reads without asking the device for anything.

A lane is a ring of rows. `publish_` fills a row in stream order and stores its ticket last; the host looks for the
ticket. On CUDA the rows are mapped page-locked memory, on the CPU ordinary memory, with the same order of stores.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_ops = torch.ops.syncfree
_publish = _ops.publish_.default
_read = _ops.read_slot.default

# The header of a row (csrc/common/loop_params.h).
END, BEGIN, ORIGIN, REPEAT, COLUMNS = range(5)

# Mapped memory is never freed (csrc/cuda/ops/mapped.h); rows that nothing is on its way to any more are used again.
_spare: dict[tuple[int, int, int], list[tuple[Tensor, Tensor]]] = {}
_spare_lock = threading.Lock()


class Lane:
    """A ring of rows of `columns` scalars, float64 before first_integer_column and int64 from there on."""

    def __init__(self, device: torch.device, rows: int, columns: int, first_integer_column: int) -> None:
        self.rows, self.width, self.first_integer_column = rows, COLUMNS + columns, first_integer_column
        self._pid = os.getpid()
        self._key = (device.index, rows, self.width) if device.type == "cuda" else None
        self.host, self.slots = self._take(device)
        self._cells = (ctypes.c_int64 * self.host.numel()).from_address(self.host.data_ptr())

    def _take(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._key is None:
            host = torch.zeros(self.rows, self.width, dtype=torch.int64, device=device)
            return host, host
        with _spare_lock:
            pair = _spare.get(self._key, []).pop() if _spare.get(self._key) else None
        if pair is None:
            host, slots = _ops.mapped_slots(torch.empty(0, device=device), self.rows, self.width)
            return host, slots
        pair[0].zero_()  # the tickets of its former life
        return pair

    def recycle(self) -> None:
        """Hand the memory on. Nothing may be on its way to it, and the lane must not be used any more."""
        if self._key is not None and self.is_own:
            with _spare_lock:
                _spare.setdefault(self._key, []).append((self.host, self.slots))

    @property
    def is_own(self) -> bool:
        """False in a forked child, where page-locked memory must not be touched."""
        return self._key is None or self._pid == os.getpid()

    def publish(
        self,
        values: Sequence[Tensor],
        columns: Sequence[int],
        ticket: int = 0,
        counters: Tensor | None = None,
        origin: int = 0,
    ) -> None:
        """Store values in stream order, under a ticket, or under the next one of counters."""
        # Nothing is differentiated here, and nobody else has seen the slots: no autograd, no version to count.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            _publish(
                self.slots,
                values,
                columns,
                [],
                first_integer_column=self.first_integer_column,
                ticket=ticket,
                counters=counters,
                origin=origin,
            )

    def end(self, ticket: int) -> int:
        """The ticket of the values that are in the row of this one."""
        return self._cells[(ticket - 1) % self.rows * self.width]

    def newest(self) -> int:
        """The largest ticket that writing has begun for."""
        return max(self._cells[row * self.width + BEGIN] for row in range(self.rows))

    def read(self, ticket: int) -> list[int] | None:
        """The row of a ticket, or None where it has been overwritten, or has not arrived."""
        row: list[int] = _read(self.host, ticket).tolist()
        return row if row[END] == row[BEGIN] == ticket else None


def wait_until(arrived: Callable[[], bool], stream: torch.cuda.Stream | None, deadline: float | None) -> bool:
    """Sleep in short naps until something has arrived; False when the deadline passes first.

    The errors of the stream are raised. Should it have nothing left to do and the thing still be missing, that is a
    RuntimeError: it will never arrive.
    """
    nap = 0.0
    while not arrived():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        if nap > 0 and stream is not None and stream.query() and not arrived():
            raise RuntimeError(
                "syncfree_ext: values that were put never arrived, though their stream has finished; the kernel that "
                "stores them was not run"
            )
        time.sleep(nap)
        nap = min(nap + 1e-5, 2e-4)
    return True


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that work for the device goes to now; None for the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def is_capturing(device: torch.device) -> bool:
    """Whether work for the device is being recorded into a CUDA graph now."""
    if device.type != "cuda":
        return False
    if torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def resolve_device(function: str, device: torch.device | str | int) -> torch.device:
    """A CPU device, or a CUDA device with its index."""
    resolved = torch.device(device)
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"{function}: device must be a CPU or CUDA device, got {resolved}")
    if resolved.type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if resolved.index is None else resolved.index)
