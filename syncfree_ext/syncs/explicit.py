"""Public calls that wait without being ops, wrapped while someone listens.

torch's sync-debug mode is silent about events, devices and collectives, and no dispatch mode sees them. The wrappers
are put in place by the first listener and taken away by the last. A function that was imported by name before that
(`from torch.cuda import synchronize`) is not seen.

Events that are recorded, and waited for by a stream, make no host wait. Who asks is told of them, because they say in
what order the streams work; and of the replay of a graph, which is work without an op.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from .kinds import Counts, Hint, Kind

# Name for the report, hint, and what the call was made on: a stream, an event, or None.
Around = Callable[[str, Hint, Any], AbstractContextManager[None]]
# An event, a stream (None: the current one), and whether the stream waits for the event or records it.
Link = Callable[[Any, Any, bool], None]

_WAIT = Hint(Kind.EXPLICIT)
_WAIT_IF_SLOW = Hint(Kind.EXPLICIT, "", Counts.IF_SLOW)
_COLLECTIVE = Hint(Kind.COLLECTIVE, "", Counts.IF_SLOW)
_EMPTY_CACHE = Hint(Kind.ALLOCATOR, "empty_cache")

# Work was launched that is no op's.
Unseen = Callable[[], None]

_listeners: list[tuple[Around, Link | None, Unseen | None]] = []
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
        subject = args[0] if args and isinstance(args[0], (torch.cuda.Stream, torch.cuda.Event)) else None
        with ExitStack() as stack:
            for around, _, _ in tuple(_listeners):
                stack.enter_context(around(name, hint, subject))
            return original(*args, **kwargs)

    return wrapper


def _linked(original: Any, waits: bool) -> Any:
    @functools.wraps(original)
    def wrapper(event: Any, stream: Any = None) -> Any:
        result = original(event, stream)
        if not torch.compiler.is_compiling():
            for _, link, _ in tuple(_listeners):
                if link is not None:
                    link(event, stream, waits)
        return result

    return wrapper


def _launching(original: Any) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not torch.compiler.is_compiling():
            for _, _, unseen in tuple(_listeners):
                if unseen is not None:
                    unseen()
        return result

    return wrapper


def _graphs() -> list[Any]:
    """The classes of graphs that are replayed."""
    return [torch.cuda.CUDAGraph, *filter(None, [getattr(torch.accelerator, "Graph", None)])]


def _install() -> None:
    def put(owner: Any, attribute: str, wrapper: Any) -> None:
        # None: the class inherits it, and taking the wrapper away is enough.
        _originals.append((owner, attribute, vars(owner).get(attribute)))
        setattr(owner, attribute, wrapper)

    for owner, attribute, name, hint in _targets():
        put(owner, attribute, _wrapped(getattr(owner, attribute), name, hint))
    for attribute, waits in (("record", False), ("wait", True)):
        put(torch.cuda.Event, attribute, _linked(getattr(torch.cuda.Event, attribute), waits))
    for graph in _graphs():
        put(graph, "replay", _launching(graph.replay))


def _remove() -> None:
    while _originals:
        owner, attribute, own = _originals.pop()
        if own is None:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, own)


@contextmanager
def listening(around: Around, link: Link | None = None, unseen: Unseen | None = None) -> Iterator[None]:
    """Inside, each of these calls runs within `around(name, hint, subject)`.

    `link` is told of events and streams, `unseen` of graphs that were replayed.
    """
    listener = around, link, unseen
    with _lock:
        if not _listeners:
            _install()
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)
            if not _listeners:
                _remove()
