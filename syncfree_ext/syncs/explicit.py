"""Public calls that wait without being ops, wrapped while someone listens.

torch's sync-debug mode is silent about events, devices and collectives, and no dispatch mode sees them. The wrappers
are put in place by the first listener and taken away by the last. A function that was imported by name before that
(`from torch.cuda import synchronize`) is not seen.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from .kinds import Counts, Hint, Kind

Around = Callable[[str, Hint], AbstractContextManager[None]]

_WAIT = Hint(Kind.EXPLICIT)
_WAIT_IF_SLOW = Hint(Kind.EXPLICIT, "", Counts.IF_SLOW)
_COLLECTIVE = Hint(Kind.COLLECTIVE, "", Counts.IF_SLOW)
_EMPTY_CACHE = Hint(Kind.ALLOCATOR, "empty_cache")

_listeners: list[Around] = []
_originals: list[tuple[Any, str, Any]] = []
_lock = threading.RLock()


def _targets() -> Iterator[tuple[Any, str, str, Hint]]:
    """Owner, attribute, name for the report, hint."""
    yield torch.cuda, "synchronize", "torch.cuda.synchronize", _WAIT
    yield torch.cuda, "empty_cache", "torch.cuda.empty_cache", _EMPTY_CACHE
    yield torch.cuda.Stream, "synchronize", "Stream.synchronize", _WAIT
    yield torch.cuda.Event, "synchronize", "Event.synchronize", _WAIT_IF_SLOW
    yield torch.accelerator, "synchronize", "torch.accelerator.synchronize", _WAIT
    distributed = torch.distributed
    if distributed.is_available():
        yield distributed, "barrier", "torch.distributed.barrier", _COLLECTIVE
        yield distributed, "monitored_barrier", "torch.distributed.monitored_barrier", _COLLECTIVE
        yield distributed.Work, "wait", "Work.wait", _COLLECTIVE


def _wrapped(original: Any, name: str, hint: Hint) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        with ExitStack() as stack:
            for around in tuple(_listeners):
                stack.enter_context(around(name, hint))
            return original(*args, **kwargs)

    return wrapper


def _install() -> None:
    for owner, attribute, name, hint in _targets():
        # None: the class inherits it, and taking the wrapper away is enough.
        own = vars(owner).get(attribute)
        _originals.append((owner, attribute, own))
        setattr(owner, attribute, _wrapped(getattr(owner, attribute), name, hint))


def _remove() -> None:
    while _originals:
        owner, attribute, own = _originals.pop()
        if own is None:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, own)


@contextmanager
def listening(around: Around) -> Iterator[None]:
    """Inside, each of these calls runs within `around(name, hint)`."""
    with _lock:
        if not _listeners:
            _install()
        _listeners.append(around)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(around)
            if not _listeners:
                _remove()
