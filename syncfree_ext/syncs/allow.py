"""The allow file: the waits that are meant, each with its reason.

One entry a line, and after `#` the reason, which must be there:

    train.py:88                               # prints the loss every step, for now
    train.py::log_metrics   kind=scalar read  # reads at the log interval
    transformers/*          max=4             # the trainer's own

The first word is a glob on the file as the report names it (the user's line or the library's line inside), with
`:line` or `::function` where it should be narrower. A line number moves when the file is edited, a function's name does
not. `kind=` narrows to one kind, `max=` allows no more than so many calls a step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from .kinds import Kind
from .report import Report, Row

_ENTRY = re.compile(
    r"(?P<file>[^\s:]+)(::(?P<function>[^\s:]+)|:(?P<line>\d+))?"
    r"(\s+kind=(?P<kind>[a-z]+( [a-z]+)*?))?(\s+max=(?P<max>\d+(\.\d+)?))?"
)


@dataclass(frozen=True)
class Allowed:
    """One entry of the file."""

    text: str
    reason: str
    file: str
    line: int | None
    function: str | None
    kind: str | None
    most: float | None

    def covers(self, row: Row) -> bool:
        """Whether a row is what this entry speaks of."""
        if self.kind is not None and row.kind != self.kind:
            return False
        if self._is(row.file, row.line, row.function):
            return True
        file, _, line = (row.via or "").rpartition(":")
        return bool(file) and self.function is None and self._is(file, int(line), "")

    def _is(self, file: str, line: int, function: str) -> bool:
        if self.line is not None and self.line != line:
            return False
        if self.function is not None and self.function not in (function, function.rpartition(".")[2]):
            return False
        return fnmatchcase(file, self.file) or fnmatchcase(file, "*/" + self.file)


@dataclass
class Check:
    """A report held against an allow file."""

    calls: float  # a step, that no entry allows
    rows: list[Row]  # with such calls
    unused: list[Allowed]  # entries that nothing matched


def read(path: str | Path) -> list[Allowed]:
    """The entries of an allow file.

    Raises:
        ValueError: a line that is no entry, has no reason or names no kind; with file, line and what was expected.
        OSError: the file cannot be read.
    """
    entries = []
    kinds = [str(kind) for kind in Kind]
    for number, text in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        entry, _, reason = (part.strip() for part in text.partition("#"))
        if not entry:
            continue
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(
                f"{path}:{number}: expected FILE[:LINE|::FUNCTION] [kind=KIND] [max=N] # reason, got {text.strip()!r}"
            )
        if not reason:
            raise ValueError(f"{path}:{number}: expected a reason after #, got none for {entry!r}")
        if match["kind"] is not None and match["kind"] not in kinds:
            raise ValueError(f"{path}:{number}: expected kind to be one of {', '.join(kinds)}, got {match['kind']!r}")
        entries.append(
            Allowed(
                entry,
                reason,
                match["file"],
                int(match["line"]) if match["line"] else None,
                match["function"],
                match["kind"],
                float(match["max"]) if match["max"] else None,
            )
        )
    return entries


def check(report: Report, entries: Sequence[Allowed] = ()) -> Check:
    """Counts the waits that no entry allows. Each row uses the first entry that covers it."""
    left = {id(entry): entry.most for entry in entries}
    used: set[int] = set()
    result = Check(0.0, [], [])
    for row in report.rows:
        calls = row.calls
        entry = next((entry for entry in entries if entry.covers(row)), None)
        if entry is not None:
            used.add(id(entry))
            most = left[id(entry)]
            allowed = calls if most is None else min(calls, most)
            if most is not None:
                left[id(entry)] = most - allowed
            calls -= allowed
        if calls > 1e-9:
            result.calls += calls
            result.rows.append(row)
    result.unused = [entry for entry in entries if id(entry) not in used]
    return result
