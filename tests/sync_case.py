"""Reads the marks of tests/sync_cases and compares them with what find_syncs reports."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from syncfree_ext.syncs import Report, runner

FOLDER = Path(__file__).parent / "sync_cases"
PATHS = sorted(path for path in FOLDER.glob("*.py") if path.name != "common.py")
FREE = [path for path in PATHS if path.name.startswith("f")]
NEEDS_RANKS = {"c24_sync_batch_norm.py"}  # a second GPU

_MARK = re.compile(r"# FIND(?P<backward> BACKWARD)?: (?P<what>[\w ]+?)\s*(?=#|$)")


@dataclass(frozen=True)
class Marks:
    """What must be found in a case: lines with kinds, and lines with autograd nodes."""

    lines: frozenset[tuple[int, str]]
    nodes: frozenset[tuple[int, str]]


def marks(path: Path) -> Marks:
    """The marks of a case."""
    lines, nodes = set(), set()
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for match in _MARK.finditer(text):
            (nodes if match["backward"] else lines).add((number, match["what"]))
    return Marks(frozenset(lines), frozenset(nodes))


def found(report: Report, path: Path) -> Marks:
    """What was found, in the form of marks; a row in another file has line 0 and says where."""
    lines, nodes = set(), set()
    for row in report.rows:
        here = Path(row.file).name == path.name
        lines.add((row.line, row.kind) if here else (0, f"{row.kind} at {row.where}"))
        if row.node is not None:
            nodes.add((row.line if here else 0, row.node))
    return Marks(frozenset(lines), frozenset(nodes))


def differences(path: Path, report: Report) -> list[str]:
    """What is missing and what is there too much, one sentence each; empty if the marks are met exactly.

    What was measured follows, to tell why.
    """
    want, got = marks(path), found(report, path)
    texts = [f"{path.name}:{line} {what} was not found" for line, what in sorted(want.lines - got.lines)]
    texts += [f"{path.name}:{line} {what} was found without a mark" for line, what in sorted(got.lines - want.lines)]
    texts += [f"{path.name}:{line} backward of {node} was not found" for line, node in sorted(want.nodes - got.nodes)]
    if texts:
        texts += [
            f"row {row.where} {row.kind} {row.op} {row.detail}: {row.calls:g} a step, blocked {row.blocked_ms:.3f} ms, "
            f"waited {row.waited_ms:.3f} ms"
            for row in report.rows
        ]
        texts += [f"slow {op.where} {op.op}: {op.calls:g} a step, {op.ms:.3f} ms" for op in report.slow]
    return texts


def run(path: Path, **options: Any) -> Report:
    """The report of a case.

    Raises:
        RuntimeError: the case itself failed.
    """
    if torch.cuda.is_initialized():
        # Else the blocks that an earlier run freed serve this one, and a case about allocating them has none to find.
        # It is private to torch, and builds without CUDA do not have it.
        getattr(torch._C, "_host_emptyCache", lambda: None)()
    sys.modules.pop("common", None)  # whose device is that of the first case, which may have had a simulated card
    outcome = runner.run(str(path), [], **{"warmup": 2, "steps": 5, **options})
    if outcome.status:
        raise RuntimeError(f"{path.name} ended with status {outcome.status}")
    return outcome.report
