"""Scalars of the device, read by the host once they have arrived, and never waited for.

`loss.item()` in each step makes the host wait until the GPU has caught up, and the GPU idle until the host has queued
the next step. A copy into pinned memory does not help while bulk copies run: it queues behind them in the copy engine,
and everything after it on its stream waits with it. `AsyncScalars` stores the values by a kernel instead.
"""

from __future__ import annotations

import numbers
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from . import _checks
from ._slots import COLUMNS, ORIGIN, REPEAT, Lane, check_storable, is_capturing, resolve_device, wait_until

Value: TypeAlias = "Tensor | float | int"
Delivery: TypeAlias = "tuple[Any, dict[str, float | int]]"

_NAME = "syncfree_ext.AsyncScalars"
# Captured puts of one object; each has a counter of its own on the device.
_MAX_CAPTURED = 256
# How long a block that is left by an exception waits for what is still on its way, in seconds.
_EXCEPTION_TIMEOUT = 10.0

# What a captured graph stores to outlives every Python object: the graph may be replayed at any time.
_captured_memory: list[Any] = []


class _Field(NamedTuple):
    """Where the value of a name is found: in a column of the row, or on the host already."""

    name: str
    column: int | None
    constant: float | int


class _Entry(NamedTuple):
    """A put whose values are on their way."""

    tag: Any
    ticket: int
    fields: list[_Field]
    stream: int


class AsyncScalars:
    """A ring through which scalars travel from the device to the host, in order, without either waiting.

        with AsyncScalars("cuda", ["loss", "grad_norm"]) as ring:
            for step, batch in enumerate(loader):
                ...
                ring.put(step, {"loss": loss, "grad_norm": grad_norm})
                for tag, values in ring.poll():
                    log(tag, values["loss"])
        for tag, values in ring.poll():  # the last steps
            log(tag, values["loss"])

    On CUDA, `put` is one kernel on the current stream (`torch.ops.syncfree.publish_`): it gathers the values, casts
    them, and stores them with a sequence number into page-locked host memory that is mapped into the device. It takes
    no copy engine, no event and no second stream. The host finds the sequence number by reading its own memory. On the
    CPU the same happens at once; results are the same, only earlier.

    Values are snapshots in stream order: what is written to a source after `put` is not seen. Each is delivered once,
    through `poll`, `get` or `flush`, in the order of the puts; none is lost (but see on_full, and CUDA graphs below).

    The object takes 8 bytes of page-locked memory for each name, and 32 more, in each of 2 * depth rows, all allocated
    at construction. Memory that `close` could give back is used again by later objects, but never returned to the
    system.

    In a CUDA graph. A put that is captured is repeated by each replay. Replays whose puts go to one object must follow
    one another (on one stream, or by events), or they write to the same row. It counts its replays on the device; the
    tag of the n-th one, n = 0, 1, ..., is (tag, n). Replays share a ring of their own, of depth rows, which they
    overwrite without looking: of more than depth replays between two polls the oldest are lost, and counted in
    `dropped`. They come in their own order, which is not compared with that of other puts. A number among the values is
    baked in. `poll` sees replays; `flush` and `close` wait for the whole device once something has been captured. The
    memory is then kept for the life of the process.

    Two threads may use one object. In a forked child it delivers only what had been read before the fork. In code
    under torch.compile call `put` outside of what is compiled: it is a host-side call.

    Args:
        device: "cpu", or a CUDA device; one object serves one device.
        names: the names, whose values become float64; or a mapping from name to torch.float64 or torch.int64. int64 is
            exact and takes integers only.
        depth: how many puts may be on their way at a time, 1 or more.
        on_full: what `put` does when so many are on their way: "wait" until the oldest has arrived, which also bounds
            how far the host runs ahead of the device; "drop_oldest", which keeps the newest depth values, arrived or
            not, and counts the others in `dropped`; or "error", which raises RuntimeError. With "wait" and "error"
            values that have arrived do not count: they are moved to a list that grows until they are read.

    Raises:
        ValueError: device is neither, names are empty, not unique or of another dtype, depth is below 1, or on_full is
            unknown.
        TypeError: names are no strings.
    """

    def __init__(
        self,
        device: torch.device | str | int,
        names: Sequence[str] | Mapping[str, torch.dtype],
        *,
        depth: int = 2,
        on_full: Literal["wait", "drop_oldest", "error"] = "wait",
    ) -> None:
        self.device = resolve_device(_NAME, device)
        dtypes = _dtypes_of(names)
        _checks.check_at_least(_NAME, "depth", depth, 1)
        if on_full not in ("wait", "drop_oldest", "error"):
            raise ValueError(f"{_NAME}: on_full must be 'wait', 'drop_oldest' or 'error', got {on_full!r}")
        if is_capturing(self.device):
            raise RuntimeError(f"{_NAME}: expected to be made before the capture of a CUDA graph, got a capture")
        self.names = tuple(dtypes)
        self.depth = depth
        self.on_full = on_full
        self.dropped = 0
        # float64 columns first (csrc/schemas.cpp).
        order = sorted(self.names, key=lambda name: dtypes[name] == torch.int64)
        self._columns = {name: (column, _Field(name, column, 0)) for column, name in enumerate(order)}
        self._first_integer = sum(dtype == torch.float64 for dtype in dtypes.values())
        self._lane = Lane(self.device, depth, len(order), self._first_integer)
        self._replays = Lane(self.device, depth, len(order), self._first_integer)
        self._counters = torch.zeros(1 + _MAX_CAPTURED, dtype=torch.int64, device=self.device)
        self._captured: list[tuple[Any, list[_Field]]] = []
        self._next_replay = 1
        self._tickets = 0
        self._pending: deque[_Entry] = deque()
        self._ready: deque[Delivery] = deque()
        self._latest: Delivery | None = None
        self._closed = False
        self._lock = threading.RLock()  # of the queues: never held while waiting
        self._put_lock = threading.RLock()  # one put at a time
        self._at_exit: list[Callable[[], None]] = []

    # ------------------------------------------------------------------------------------------------------------- put

    def put(self, tag: Any, values: Mapping[str, Value]) -> None:
        """Send values on their way, as they are now in the order of the current stream.

        Waits only when depth earlier puts are still on their way and on_full is "wait".

        Args:
            tag: any object, None included; comes back with the values. Tags need not be unique. `get` finds it by
                equality, a tensor or an array by identity.
            values: names of the ring, any of them, to tensors with one element (floating but not float8, signed, uint8
                or bool; for an int64 name no floating one) or numbers. A tensor on the CPU counts as a number.
                Gradients are not tracked.

        Raises:
            KeyError: a name is not one of the ring's.
            TypeError: a value is no real number or tensor of one, or no integer for an int64 name.
            ValueError: a tensor has more than one element, or is on another CUDA device.
            RuntimeError: the ring is closed, or full with on_full="error".
        """
        with self._put_lock:
            if self._closed:
                raise RuntimeError(f"{_NAME}.put: expected an open ring, got one that was closed")
            tensors, columns, fields = self._sort(values)
            stream = self._lane.stream()
            if stream is None:
                self._put_captured(tag, tensors, columns, fields)
                return
            self._make_room(stream)
            self._lane.publish(tensors, columns, ticket=self._tickets + 1)
            with self._lock:
                self._tickets += 1
                self._pending.append(_Entry(tag, self._tickets, fields, stream))
                if self.on_full == "drop_oldest":
                    self._keep_newest()

    def _sort(self, values: Mapping[str, Value]) -> tuple[list[Tensor], list[int], list[_Field]]:
        """The tensors for the kernel, their columns, and where each name will be found."""
        tensors: list[Tensor] = []
        columns: list[int] = []
        fields: list[_Field] = []
        on_cuda = self.device.type == "cuda"
        for name, value in values.items():
            found = self._columns.get(name)
            if found is None:
                raise KeyError(f"{_NAME}.put: expected names of {list(self.names)}, got {name!r}")
            column, field = found
            if isinstance(value, Tensor):
                self._check_tensor(name, value, column)
                if on_cuda and value.is_cpu:
                    value = value.item()
                else:
                    tensors.append(value)
                    columns.append(column)
                    fields.append(field)
                    continue
            fields.append(_Field(name, None, self._number(name, value, column)))
        return tensors, columns, fields

    def _check_tensor(self, name: str, value: Tensor, column: int) -> None:
        if type(value) is not Tensor:
            _checks.check_tensor(f"{_NAME}.put", name, value)
        if value.numel() != 1:
            raise ValueError(f"{_NAME}.put: {name} must have one element, got shape {tuple(value.shape)}")
        check_storable(f"{_NAME}.put", name, value)
        if value.device != self.device and not value.is_cpu:
            raise ValueError(f"{_NAME}.put: {name} must be on {self.device} or the CPU, got {value.device}")
        if column >= self._first_integer and value.dtype.is_floating_point:
            raise TypeError(f"{_NAME}.put: {name} is an int64 name and must be an integer, got {value.dtype}")

    def _number(self, name: str, value: object, column: int) -> float | int:
        if not isinstance(value, (int, float, numbers.Real)):
            raise TypeError(
                f"{_NAME}.put: {name} must be a number or a tensor with one element, got {type(value).__name__}"
            )
        if column < self._first_integer:
            return float(value)
        if not isinstance(value, (int, numbers.Integral)):
            raise TypeError(f"{_NAME}.put: {name} is an int64 name and must be an integer, got {value!r}")
        integer = int(value)
        if not -(2**63) <= integer < 2**63:
            raise ValueError(f"{_NAME}.put: {name} must fit into int64, got {value}")
        return integer

    def _make_room(self, stream: int) -> None:
        """See to it that the row of the next ticket may be written."""
        with self._lock:
            self._collect()
            if len(self._pending) < self.depth:
                return
            oldest = self._pending[0]
            if self.on_full == "error":
                raise RuntimeError(
                    f"{_NAME}.put: expected fewer than depth={self.depth} puts on their way, got {len(self._pending)}"
                )
            if self.on_full == "drop_oldest":
                # Its kernel still stores into the row, and must not do so after ours.
                if oldest.stream != stream:
                    ours, theirs = self._lane.as_stream(stream), self._lane.as_stream(oldest.stream)
                    if ours is not None and theirs is not None:
                        ours.wait_stream(theirs)
                self._pending.popleft()
                self.dropped += 1
                return
        self._wait(oldest, None)
        with self._lock:
            self._collect()

    def _keep_newest(self) -> None:
        while self._ready and len(self._ready) + len(self._pending) > self.depth:
            self._ready.popleft()
            self.dropped += 1

    def _put_captured(self, tag: Any, tensors: list[Tensor], columns: list[int], fields: list[_Field]) -> None:
        with self._lock:
            if len(self._captured) == _MAX_CAPTURED:
                raise RuntimeError(f"{_NAME}.put: expected at most {_MAX_CAPTURED} captured puts, got one more")
            if not self._captured:
                _captured_memory.append((self._replays, self._counters))
            origin = len(self._captured)
            self._captured.append((tag, fields))
        self._replays.publish(tensors, columns, counters=self._counters, origin=origin)

    # --------------------------------------------------------------------------------------------------------- reading

    def poll(self) -> list[Delivery]:
        """Everything that has arrived and was not delivered before, in the order of the puts. Never waits."""
        with self._lock:
            self._collect()
            arrived = list(self._ready)
            self._ready.clear()
            return arrived

    @property
    def latest(self) -> Delivery | None:
        """The newest values that have arrived, delivered or not; None before the first. Never waits."""
        with self._lock:
            self._collect()
            return self._latest

    def get(self, tag: Any, timeout: float | None = None) -> dict[str, float | int]:
        """Wait for the values of one put, and deliver them; others stay where they are.

        Args:
            tag: what was given to `put`; of several puts with that tag, the oldest that was not delivered. For the
                n-th replay of a captured put (tag, n), which must have arrived.
            timeout: the longest wait in seconds. None: as long as it takes.

        Raises:
            KeyError: no such put is on its way or undelivered.
            TimeoutError: the values did not arrive in time; they can still be had later.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                self._collect()
                for index, (other, values) in enumerate(self._ready):
                    if _is_same(other, tag):
                        del self._ready[index]
                        return values
                if not any(_is_same(entry.tag, tag) for entry in self._pending):
                    raise KeyError(f"{_NAME}.get: expected a tag that is on its way or undelivered, got {tag!r}")
                oldest = self._pending[0]  # values become readable in the order of the puts
            if not self._wait(oldest, deadline):
                raise TimeoutError(f"{_NAME}.get: the values of {tag!r} did not arrive within {timeout} s")

    def flush(self) -> list[Delivery]:
        """Wait for all that was put, and deliver what was not delivered. A second call finds nothing.

        Raises:
            RuntimeError: the device has failed. What had arrived before can still be polled.
        """
        self._wait_for_all(None)
        return self.poll()

    def close(self) -> None:
        """Wait for all that was put and give the memory back. What was not delivered can still be polled.

        Raises:
            RuntimeError: the device has failed; the ring is closed all the same.
        """
        self._close(None)

    def _close(self, deadline: float | None) -> None:
        with self._put_lock:
            if self._closed:
                return
            self._closed = True
            try:
                arrived = self._wait_for_all(deadline)
                if not arrived:
                    with self._lock:
                        count = len(self._pending)
                    warnings.warn(f"{_NAME}: closed with {count} puts still on their way; they are lost", stacklevel=3)
            except BaseException:
                arrived = False
                raise
            finally:
                with self._lock:
                    self._pending.clear()
                    lanes = [self._lane] if arrived else []
                    if arrived and not self._captured:
                        lanes.append(self._replays)
                    for lane in lanes:
                        lane.recycle()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(f"{_NAME}: a ring holds memory that the device writes to, and cannot be copied or pickled")

    def __enter__(self) -> AsyncScalars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._close(None)
            for check in self._at_exit:
                check()
            return
        # Something is wrong already: nothing that happens here may hide it, and no wait may be endless.
        try:
            self._close(time.monotonic() + _EXCEPTION_TIMEOUT)
        except Exception as later:
            warnings.warn(f"{_NAME}: while another exception was raised: {later}", stacklevel=2)

    # -------------------------------------------------------------------------------------------------------- internals

    def _wait(self, entry: _Entry, deadline: float | None) -> bool:
        if not self._lane.is_own:
            raise RuntimeError(f"{_NAME}: expected to wait in the process that made the ring, got a forked child")
        lane, ticket = self._lane, entry.ticket
        # A later ticket in its row: another thread dropped it meanwhile.
        return wait_until(lambda: lane.end(ticket) >= ticket, lane.as_stream(entry.stream), deadline)

    def _wait_for_all(self, deadline: float | None) -> bool:
        if not self._lane.is_own:
            return True
        if is_capturing(self.device):
            raise RuntimeError(f"{_NAME}: expected to wait outside the capture of a CUDA graph, got a capture")
        while True:
            with self._lock:
                self._collect()
                entry = self._pending[0] if self._pending else None
            if entry is None:
                break
            if not self._wait(entry, deadline):
                return False
        if self._captured:
            torch.cuda.synchronize(self.device)  # a replay may be on any stream
            with self._lock:
                self._collect()
        return True

    def _collect(self) -> None:
        """Move what has arrived to the list of what can be delivered. The lock is held."""
        if not self._lane.is_own:
            return
        while self._pending:
            entry = self._pending[0]
            if self._lane.end(entry.ticket) != entry.ticket:
                break
            row = self._lane.read(entry.ticket)
            assert row is not None  # nobody writes to the row before the entry is gone
            self._pending.popleft()
            self._deliver(entry.tag, entry.fields, row)
        if self._captured:
            self._collect_replays()

    def _collect_replays(self) -> None:
        lane = self._replays
        while lane.end(self._next_replay) >= self._next_replay:
            row = lane.read(self._next_replay)
            if row is None:  # overwritten, or about to be: go on with the oldest that is not
                oldest = lane.newest() - self.depth + 1
                self.dropped += oldest - self._next_replay
                self._next_replay = oldest
                continue
            self._next_replay += 1
            tag, fields = self._captured[row[ORIGIN]]
            self._deliver((tag, row[REPEAT]), fields, row)
            if self.on_full == "drop_oldest":
                self._keep_newest()

    def _deliver(self, tag: Any, fields: list[_Field], row: tuple[Any, ...]) -> None:
        values = {name: constant if column is None else row[COLUMNS + column] for name, column, constant in fields}
        self._latest = (tag, values)
        self._ready.append(self._latest)


def _is_same(tag: Any, other: Any) -> bool:
    """Whether two tags are one object, or equal. Of arrays and tensors, whose == is one as well, only the first."""
    if tag is other:
        return True
    try:
        equal = tag == other
    except Exception:
        return False
    return bool(equal) if type(equal).__name__ in ("bool", "bool_") else False


def _dtypes_of(names: Sequence[str] | Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    if isinstance(names, str):
        raise TypeError(f"{_NAME}: names must be a sequence or a mapping of strings, got {names!r}")
    listed = list(names)
    for name in listed:
        if not isinstance(name, str):
            raise TypeError(f"{_NAME}: names must be strings, got {name!r}")
    if not listed or len(set(listed)) != len(listed):
        raise ValueError(f"{_NAME}: names must be unique, at least one, got {listed}")
    dtypes = dict(names) if isinstance(names, Mapping) else dict.fromkeys(listed, torch.float64)
    for name, dtype in dtypes.items():
        if dtype not in (torch.float64, torch.int64):
            raise ValueError(f"{_NAME}: {name} must be torch.float64 or torch.int64, got {dtype}")
    return dtypes
