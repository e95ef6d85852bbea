"""Where a step ends: after optimizer.step, or where the script says so.

torch calls a global hook after each optimizer's step (register_optimizer_step_post_hook, public), so a script need not
be changed. Of several optimizers the first one that steps is the clock. A script that calls `step()` is the clock
itself from its first call on, and the hooks no longer count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

_listeners: list[_Boundaries] = []


def step() -> None:
    """Marks the end of a step, for loops without an optimizer. Outside of `find_syncs` it does nothing."""
    for listener in tuple(_listeners):
        listener.marked()


class _Boundaries:
    def __init__(self, ended: Callable[[], None], restarted: Callable[[], None]) -> None:
        self._ended = ended
        self._restarted = restarted
        self._optimizer: weakref.ref[Any] | None = None
        self._has_marks = False

    def marked(self) -> None:
        if not self._has_marks:
            self._has_marks = True
            self._restarted()
        self._ended()

    def stepped(self, optimizer: Any, *_: object) -> None:
        if self._has_marks:
            return
        clock = self._optimizer() if self._optimizer is not None else None
        if clock is None:  # none has stepped, or the one that did is gone
            self._optimizer, clock = weakref.ref(optimizer), optimizer
        if clock is optimizer:
            self._ended()


@contextmanager
def boundaries(ended: Callable[[], None], restarted: Callable[[], None]) -> Iterator[None]:
    """Inside, `ended()` is called at the end of each step, and `restarted()` when steps that were counted were none."""
    listener = _Boundaries(ended, restarted)
    handle = register_optimizer_step_post_hook(listener.stepped)
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        handle.remove()
