"""The detector: torch's sync-debug warnings, each with its line, for whoever listens.

torch can warn before it synchronises (torch.cuda.set_sync_debug_mode). The mode is global, Python shows a warning once
for each line, and any thread can switch it off. Here it is switched on by the first listener and restored by the last;
the warnings reach the listeners, not the terminal, each time and with the line of the user's code; and `no_sync` acts
on those of its own context alone (contextvars), so that a logging thread may read what it likes.

The mode misses waits for events and devices, collectives and copies from pageable memory with non_blocking=True. All
but the last are seen through explicit.py. In backward torch collects the warnings of C++ nodes and gives them out when
backward ends: their line is that of the call of backward.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from . import explicit
from .internals import SYNC_WARNING
from .kinds import Hint
from .sites import Frames, Stack, resolve

Listener = Callable[[Stack], None]


class SyncWarning(UserWarning):
    """The host waited for the GPU where `no_sync("warn")` says it should not."""


class SyncError(RuntimeError):
    """The host waited for the GPU where `no_sync("error")` says it must not."""


@dataclass(frozen=True)
class Found:
    """One call site that waited."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


@dataclass(eq=False)
class Checked:
    """What `no_sync` saw in its block: how often each call site waited."""

    found: Counter[Found] = field(default_factory=Counter)
    allowed: Counter[tuple[str, Found]] = field(default_factory=Counter)  # with the reason that allow_sync gave


class _Hook:
    """Holds the debug mode and warnings.showwarning while there are listeners."""

    def __init__(self) -> None:
        self._listeners: list[tuple[Frames, Listener]] = []
        self._lock = threading.RLock()
        self._filters: Any = None
        self._show: Any = None
        self._mode: int | None = None

    def add(self, frames: Frames, listener: Listener) -> None:
        with self._lock:
            self._listeners.append((frames, listener))
            if len(self._listeners) == 1:
                self._switch_on()

    def remove(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = [entry for entry in self._listeners if entry[1] is not listener]
            if not self._listeners:
                self._switch_off()

    def _switch_on(self) -> None:
        if torch.cuda.is_available():
            self._mode = torch.cuda.get_sync_debug_mode()
            with warnings.catch_warnings():
                # torch says once that the mode does not see everything, which this module's head says too.
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("warn")
        self._show = warnings.showwarning
        before = list(warnings.filters)
        warnings.filterwarnings("always", message=SYNC_WARNING)
        self._filters = next((entry for entry in warnings.filters if entry not in before), None)
        warnings.showwarning = functools.partial(self._showwarning, self._show)

    def _switch_off(self) -> None:
        if self._mode is not None:
            torch.cuda.set_sync_debug_mode(self._mode)
            self._mode = None
        # Whoever replaced it since, a catch_warnings that is still open for example, keeps what they put there.
        if getattr(warnings.showwarning, "func", None) == self._showwarning:
            warnings.showwarning = self._show
        if self._filters is not None and self._filters in warnings.filters:
            warnings.filters.remove(self._filters)  # type: ignore[attr-defined]

    def _showwarning(self, show: Any, message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
        if not str(message).startswith(SYNC_WARNING):
            show(message, category, *args, **kwargs)
            return
        frame = sys._getframe(1)
        for frames, listener in tuple(self._listeners):
            listener(frames.capture(frame))


_hook = _Hook()


@contextmanager
def detecting(frames: Frames, listener: Listener) -> Iterator[None]:
    """Inside, each warning of the sync-debug mode calls `listener(stack)`, in the thread that waited."""
    _hook.add(frames, listener)
    try:
        yield
    finally:
        _hook.remove(listener)


# Of this context: the no_sync blocks that are open, and the reason of the innermost allow_sync.
_open: ContextVar[tuple[Checked, ...]] = ContextVar("open", default=())
_reason: ContextVar[str | None] = ContextVar("reason", default=None)


@contextmanager
def no_sync(action: Literal["error", "warn"] = "error", *, user: Sequence[str] = ()) -> Iterator[Checked]:
    """A block, or as a decorator a function, in which the host must not wait for the GPU.

    Seen are the syncs that torch's sync-debug mode reports, and explicit waits and barriers (the module's head says
    what is missed). Only this thread, and backward calls that it makes, are watched. Without a CUDA device nothing
    can wait and nothing is found.

    Args:
        action: "error" raises SyncError at the op that waited, "warn" warns of each call site once.
        user: folders or files whose lines count as yours although they lie in site-packages.

    Yields:
        What was found and what was allowed, counted by call site.

    Raises:
        SyncError: the host waited, outside of allow_sync.
        ValueError: an unknown action.
    """
    if action not in ("error", "warn"):
        raise ValueError(f'no_sync: action must be "error" or "warn", got {action!r}')
    checked = Checked()
    frames = Frames(user)

    def report(stack: Stack, what: str) -> None:
        if checked not in _open.get():
            return  # another thread, or another task
        mark = stack.user or stack.library
        if stack.engine:
            what += " in backward"
            if mark is None:  # a C++ node, whose warning torch gives out in the frame that ran the engine
                caller = frames.capture(sys._getframe(1), into_backward=True)
                mark = caller.user or caller.library
        site = resolve(mark or stack.torch)
        found = Found(site.file, site.line, what) if site is not None else Found("<unknown>", 0, what)
        reason = _reason.get()
        if reason is not None:
            checked.allowed[reason, found] += 1
            return
        checked.found[found] += 1
        advice = 'If it is meant, wrap it: with allow_sync("why").'
        if action == "error":
            raise SyncError(f"the host waited for the GPU at {found}. {advice}")
        if checked.found[found] == 1:
            warnings.warn_explicit(
                f"the host waited for the GPU: {what}. {advice}", SyncWarning, found.file, found.line
            )

    @contextmanager
    def around(name: str, hint: Hint, subject: Any) -> Iterator[None]:
        # Work.wait of NCCL makes the stream wait, not the host.
        if name != "Work.wait":
            report(frames.capture(sys._getframe(1)), name)
        yield

    opened = _open.set((*_open.get(), checked))
    forbidden = _reason.set(None)
    try:
        with detecting(frames, lambda stack: report(stack, "a synchronizing operation")), explicit.listening(around):
            yield checked
    finally:
        _reason.reset(forbidden)
        _open.reset(opened)


@contextmanager
def allow_sync(reason: str) -> Iterator[None]:
    """A block, or as a decorator a function, in which `no_sync` lets the host wait, and counts it under the reason.

    Raises:
        ValueError: the reason is empty.
    """
    if not isinstance(reason, str) or not reason.strip():
        raise ValueError(f"allow_sync: reason must say why the host may wait, got {reason!r}")
    allowed = _reason.set(reason)
    try:
        yield
    finally:
        _reason.reset(allowed)
