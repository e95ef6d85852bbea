"""Turns on the GPU, among all processes of this user on this machine."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(tempfile.gettempdir())


@contextmanager
def locked(name: str, how: int, folder: Path = FOLDER) -> Iterator[int]:
    """Holds a lock file; yields its descriptor, by which it can be let go earlier."""
    file = os.open(folder / f"syncfree-tests-{os.getuid()}-{name}", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, how)
        yield file
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, too
        os.close(file)


@contextmanager
def turn(alone: bool, folder: Path = FOLDER) -> Iterator[None]:
    """Uses the GPU with others, or alone. Who waits to be alone keeps the door, so that no others enter before."""
    how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with locked("door", fcntl.LOCK_EX, folder) as door, locked("gpu", how, folder):
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
