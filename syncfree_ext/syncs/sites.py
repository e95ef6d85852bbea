"""Where in the source a call was made: the user's line, the library's line that lies inside, and torch's own.

Frames are classed by file, once for each code object. A capture keeps code objects and instruction offsets, which
costs about a tenth of a microsecond a frame; lines and sources are looked up when the report is made.
"""

from __future__ import annotations

import linecache
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep  # noqa: PTH100, PTH120
_DYNAMO = (_TORCH + "_dynamo" + os.sep, _TORCH + "_compile.py")
_DISTRIBUTED = _TORCH + "distributed" + os.sep
_ENGINE = _TORCH + os.sep.join(("autograd", "graph.py"))  # noqa: PTH118
_STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_PACKAGES = ("site-packages" + os.sep, "dist-packages" + os.sep)

OURS, TORCH, STDLIB, LIBRARY, USER = range(5)


class Mark(NamedTuple):
    """One frame at one moment, cheap to take."""

    code: CodeType
    offset: int


@dataclass(frozen=True)
class Site:
    """One line of source."""

    file: str
    line: int
    function: str
    first_line: int = 0

    def __str__(self) -> str:
        return f"{short_path(self.file)}:{self.line}"

    @property
    def source(self) -> str:
        """The line's text, without indentation; empty where the file is not at hand."""
        return linecache.getline(self.file, self.line).strip()

    def excerpt(self, around: int = 2) -> list[tuple[int, str]]:
        """Lines around this one, each with its number."""
        lines = linecache.getlines(self.file)
        first = max(1, self.line - around)
        return [(n, lines[n - 1].rstrip("\n")) for n in range(first, min(len(lines), self.line + around) + 1)]


class Stack(NamedTuple):
    """The frames that matter of one call. Any of them can be missing."""

    user: Mark | None  # innermost frame of the user's own code
    library: Mark | None  # innermost frame outside torch, if that is another one
    torch: Mark | None  # innermost frame inside torch
    distributed: bool  # torch.distributed lies between the two
    engine: bool  # the walk ended at the call of autograd's engine: what is inside runs in backward


def short_path(file: str) -> str:
    """A path as a person reads it: relative to the working directory, or from site-packages on."""
    for folder in _PACKAGES:
        _, separator, tail = file.rpartition(folder)
        if separator:
            return tail
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


class Frames:
    """Walks stacks; knows which files are the user's.

    Args:
        user: folders or files that count as the user's code although they lie in site-packages.
    """

    def __init__(self, user: Sequence[str] = ()) -> None:
        self._user = tuple(os.path.abspath(path) for path in user)  # noqa: PTH100
        self._classes: dict[CodeType, int] = {}

    def class_of(self, code: CodeType) -> int:
        """OURS, TORCH, LIBRARY or USER."""
        found = self._classes.get(code)
        if found is None:
            found = self._classes[code] = self._class_of_file(code.co_filename)
        return found

    def _class_of_file(self, file: str) -> int:
        if any(file == path or file.startswith(path + os.sep) for path in self._user):
            return USER
        if file.startswith(_OURS):
            return OURS
        if file.startswith(_TORCH):
            # Dynamo's frames stand around others (a dispatch mode, a compiled function) and say nothing.
            return STDLIB if file.startswith(_DYNAMO) else TORCH
        if any(folder in file for folder in _PACKAGES):
            return LIBRARY
        # Generated code (<string>, <frozen runpy>) has no line to show; what called it has. A notebook's cells have.
        if file.startswith(_STDLIB) or (file.startswith("<") and not file.startswith("<ipython")):
            return STDLIB
        return USER

    def capture(self, frame: FrameType | None, into_backward: bool = False) -> Stack:
        """The frames that matter, from `frame` outwards.

        The walk ends at the user's first frame, or at the call of autograd's engine: what runs inside is not the doing
        of the line that called backward. `into_backward` walks on, to find that line.
        """
        user = library = inner = None
        distributed = engine = False
        while frame is not None:
            code = frame.f_code
            kind = self.class_of(code)
            if kind == USER:
                user = Mark(code, frame.f_lasti)
                break
            if kind == LIBRARY:
                if library is None:
                    library = Mark(code, frame.f_lasti)
            elif kind == TORCH:
                if inner is None:
                    inner = Mark(code, frame.f_lasti)
                if library is None:
                    distributed = distributed or code.co_filename.startswith(_DISTRIBUTED)
                if code.co_filename == _ENGINE and code.co_name == "_engine_run_backward" and not into_backward:
                    engine = True
                    break
            frame = frame.f_back
        return Stack(user, library, inner, distributed, engine)

    def innermost(self, frame: FrameType | None) -> Mark | None:
        """The innermost frame outside torch, the user's or a library's."""
        while frame is not None:
            if self.class_of(frame.f_code) in (LIBRARY, USER):
                return Mark(frame.f_code, frame.f_lasti)
            frame = frame.f_back
        return None


def resolve(mark: Mark | None) -> Site | None:
    """The line that a mark stands for."""
    if mark is None:
        return None
    code, offset = mark
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= offset < end:
            line = number if number is not None else line
            break
    function = getattr(code, "co_qualname", code.co_name)
    return Site(code.co_filename, line, function.replace("<locals>.", ""), code.co_firstlineno)
