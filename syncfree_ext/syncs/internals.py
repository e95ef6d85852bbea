"""Every use of a part of torch that is not documented as public, each with what happens where it is missing.

| used | for | without it |
|---|---|---|
| `torch.utils._python_dispatch.TorchDispatchMode` (torch's notes describe it) | the timer | no timer |
| `torch._C._current_autograd_node` | the node that runs in backward | no node, no forward line |
| `torch.autograd._get_sequence_nr`, `Node._sequence_nr` | the forward line of a node | no forward line |
| `torch._C._cuda_getCurrentStream` | which stream is current, at each op | the stream's object tells, more slowly |
| `record` of the base of `torch.cuda.Event` | an event at each op | that of the class, more slowly |
| `OpOverload._op` | an op is called at once | a function of Python's around it, more slowly |
| `torch._C._set_only_lift_cpu_tensors` | the copy in torch.tensor(data, device="cuda") | its line, not its time |
| the text of the sync-debug warning | the detector | it finds nothing |

tests/test_syncs_internals.py checks each of them against the torch at hand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

__all__ = [
    "SYNC_WARNING",
    "DispatchMode",
    "VisibleConstructors",
    "call_of",
    "current_node",
    "node_name",
    "node_sequence",
    "record",
    "sequence_number",
    "stream_key",
    "top_mode",
]

# What c10 says before it waits, in mode "warn"; torch appends where in its C++ sources that was.
SYNC_WARNING = "called a synchronizing CUDA operation"


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that leaves torch.compile on and lets higher-order ops pass."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled; the ops that it calls at run time are still seen."""
        return True


def top_mode() -> Any:
    """The dispatch mode that the next op of this thread meets first."""
    return _get_current_dispatch_mode()


def _no_node() -> None:
    return None


def _no_sequence() -> int:
    return 0


# The autograd node that runs in this thread, or None outside of backward.
current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", _no_node)

# The sequence number that this thread's next autograd node gets.
sequence_number: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", _no_sequence)


def _slow_stream_key(device: int) -> Any:
    return torch.cuda.current_stream(device)


# What tells the current stream of a device from its others.
stream_key: Callable[[int], Any] = getattr(torch._C, "_cuda_getCurrentStream", _slow_stream_key)


# Puts an event into a stream. While the timer listens, a script's own Event.record is another (explicit.py).
record: Callable[[Any, Any], None] = getattr(torch.cuda.Event.__base__, "record", torch.cuda.Event.record)


def call_of(op: Any) -> Callable[..., Any]:
    """What to call for an op: itself, or what it would call in turn."""
    return getattr(op, "_op", op) if type(op) is torch._ops.OpOverload else op


def node_name(node: Any) -> str:
    """Such as "MmBackward0"; the class's name for a torch.autograd.Function."""
    name = str(node.name()) if hasattr(node, "name") else type(node).__name__
    return name.rpartition("::")[2]


def node_sequence(node: Any) -> int | None:
    """When the node was made, in numbers of its thread."""
    read = getattr(node, "_sequence_nr", None)
    return int(read()) if read is not None else None


class VisibleConstructors:
    """Inside, torch.tensor(data, device="cuda") makes a CPU tensor first and copies it in an op that a mode sees.

    That holds for the thread that enters. Left by another one it stays, until the first calls `leave` as well.
    """

    def __init__(self) -> None:
        self._before: bool | None = None
        self._thread = 0

    def __enter__(self) -> None:
        read = getattr(torch._C, "_only_lift_cpu_tensors", None)
        if read is not None and hasattr(torch._C, "_set_only_lift_cpu_tensors"):
            self._before, self._thread = read(), threading.get_ident()
            torch._C._set_only_lift_cpu_tensors(True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Once more does nothing."""
        if self._before is not None and threading.get_ident() == self._thread:
            torch._C._set_only_lift_cpu_tensors(self._before)
            self._before = None
