"""Where in the source a call was made: the user's line, the library's line that lies inside, and torch's own.

Frames are classed by file, once for each code object: torch and this package by where they were imported from, other
libraries by the folders that this interpreter installs into. What a path merely looks like decides nothing. A capture
keeps code objects and instruction offsets, which costs about a tenth of a microsecond a frame; lines and sources are
looked up when the report is made.
"""

from __future__ import annotations

import functools
import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120
_OURS = os.path.dirname(__file__) + os.sep  # noqa: PTH120
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep  # noqa: PTH120
_DYNAMO = (_TORCH + "_dynamo" + os.sep, _TORCH + "_compile.py")
_DISTRIBUTED = _TORCH + "distributed" + os.sep
_ENGINE = _TORCH + os.sep.join(("autograd", "graph.py"))  # noqa: PTH118
_STDLIB = tuple(
    {folder + os.sep for folder in (*map(sysconfig.get_path, ("stdlib", "platstdlib")), str(Path(os.__file__).parent))}
)

OURS, TORCH, STDLIB, LIBRARY, USER = range(5)


def package_folders() -> tuple[str, ...]:
    """Where libraries are installed, each with a separator at its end.

    These are this interpreter's own folders, those on sys.path that bear the usual names (another environment's,
    through PYTHONPATH or a .pth file), and the one that torch was installed into. A folder of such a name elsewhere may
    well hold a project of the user's.
    """
    return _package_folders(tuple(sys.path))


@functools.lru_cache(maxsize=8)
def _package_folders(path: tuple[str, ...]) -> tuple[str, ...]:
    own = [*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))]
    named = [entry for entry in path if Path(entry).name in ("site-packages", "dist-packages")]
    beside = Path(_TORCH).parent  # by pip --target, say; a checkout of torch has no dist-info
    if any(beside.glob("torch-*.dist-info")):
        named.append(str(beside))
    # The longest first, so that short_path leaves the least.
    return tuple(sorted({folder.rstrip(os.sep) + os.sep for folder in (*own, *named)}, key=len, reverse=True))


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
    """A path as a person reads it: from the folder of packages on, or relative to the working directory."""
    for folder in package_folders():
        if file.startswith(folder):
            return file[len(folder) :]
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
        """OURS, TORCH, STDLIB, LIBRARY or USER."""
        found = self._classes.get(code)
        if found is None:
            found = self._classes[code] = self.class_of_file(code.co_filename)
        return found

    def class_of_file(self, file: str) -> int:
        """The class of the code in a file; STDLIB is also what stands for nobody's line."""
        if any(file == path or file.startswith(path + os.sep) for path in self._user):
            return USER
        if file.startswith(_OURS):
            return OURS
        if file.startswith(_TORCH):
            # Dynamo's frames stand around others (a dispatch mode, a compiled function) and say nothing.
            return STDLIB if file.startswith(_DYNAMO) else TORCH
        # This package is a library where it is installed editable or runs from a checkout, too.
        if file.startswith((_PACKAGE, *package_folders())):
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
        classes = self._classes
        while frame is not None:
            code = frame.f_code
            kind = classes.get(code)
            if kind is None:
                kind = self.class_of(code)
            if kind in (USER, LIBRARY):
                return Mark(code, frame.f_lasti)
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
