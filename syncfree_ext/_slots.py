"""Rows of memory that the device writes and the host reads without asking the device for anything.

A lane is a ring of rows. `publish_` fills a row in stream order and stores its ticket last; the host looks for the
ticket. On CUDA the rows are mapped page-locked memory, on the CPU ordinary memory, with the same order of stores.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_ops = torch.ops.syncfree
_publish = _ops.publish_.default
_cpu: Any = importlib.import_module(f"{__package__}._C")

# The header of a row, and the dtypes of what can be stored (csrc/common/loop_params.h).
END, BEGIN, ORIGIN, REPEAT, COLUMNS = range(5)
_KINDS = {
    torch.float64: 0,
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int64: 4,
    torch.int32: 5,
    torch.int16: 6,
    torch.int8: 7,
    torch.uint8: 8,
    torch.bool: 9,
}

# What has no dispatch of its own in Python.
_PLAIN = frozenset({Tensor, Parameter})

# Mapped memory is never freed (csrc/cuda/ops/mapped.h); rows that nothing is on its way to any more are used again.
_spare: dict[tuple[int, int, int], list[tuple[Tensor, Tensor]]] = {}
_spare_lock = threading.Lock()


def check_storable(function: str, name: str, tensor: Tensor) -> None:
    """Raise TypeError for a dtype that no row holds."""
    if tensor.dtype.is_complex:
        raise TypeError(f"{function}: {name} must be real, got {tensor.dtype}")
    if tensor.dtype not in _KINDS:
        raise TypeError(f"{function}: {name} must be neither float8 nor unsigned beyond uint8, got {tensor.dtype}")


class Lane:
    """A ring of rows of `columns` scalars, float64 before first_integer_column and int64 from there on."""

    def __init__(self, device: torch.device, rows: int, columns: int, first_integer_column: int) -> None:
        self.rows, self.width, self.first_integer_column = rows, COLUMNS + columns, first_integer_column
        self._pid = os.getpid()
        self._key = (device.index, rows, self.width) if device.type == "cuda" else None
        self._device = device
        self.host, self.slots = self._take(device)
        # What the direct calls take (csrc/common/direct_calls.h); the CPU's do not look at a device.
        self._native: Any = _cpu if self._key is None else importlib.import_module(f"{__package__}._C_cuda")
        self._written = (device.index or 0, self.slots.data_ptr(), rows, self.width, first_integer_column)
        self._seen = (self.host.data_ptr(), rows, self.width, first_integer_column)
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
        """Store values in stream order, under a ticket, or under the next one of counters.

        The values have one element each and are on the device of the lane; those for int64 columns are integers.
        """
        items = _plain_items(values, columns) if counters is None else None
        if items is not None:
            self._native.publish(*self._written, ticket, *items)
            return
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

    def read(self, ticket: int) -> tuple[Any, ...] | None:
        """The row of a ticket, or None where it has been overwritten, or has not arrived.

        Its header and int64 columns are int, the other columns float.
        """
        row: tuple[Any, ...] | None = _cpu.read(*self._seen, ticket)
        return row

    def stream(self) -> int | None:
        """The handle of the stream that work for the device goes to now, 0 on the CPU; None while it is captured."""
        if self._key is None:
            return 0
        handle: int | None = self._native.stream(self._device.index)
        return handle

    def as_stream(self, handle: int) -> torch.cuda.Stream | None:
        """The stream of a handle; None for the CPU."""
        if self._key is None:
            return None
        if handle == 0:
            return torch.cuda.default_stream(self._device)
        return torch.cuda.ExternalStream(handle, self._device)


def _plain_items(values: Sequence[Tensor], columns: Sequence[int]) -> list[int] | None:
    """Address, kind and column of each value; None where one is more than memory, which takes the dispatcher.

    That are subclasses, negative views, layouts and dtypes that a kernel cannot read, and tensors of a function
    transform.
    """
    items: list[int] = []
    try:
        for value, column in zip(values, columns, strict=True):
            kind, address = _KINDS.get(value.dtype), value.data_ptr()
            if kind is None or address == 0 or type(value) not in _PLAIN or value.is_neg():
                return None
            items += (address, kind, column)
    except RuntimeError:  # there is no address
        return None
    return items


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
