"""The report: rows of waits by call site, their cost, and how reports of several ranks become one.

All figures are for one step, in milliseconds. A report is plain data: `to_json` and `from_json` are inverse, and the
table, the page and the checks of CI read nothing else.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .kinds import Kind, advice

FORMAT = "syncfree.syncs/1"


@dataclass
class Row:
    """The waits of one call site. Times are in ms, for one step."""

    file: str
    line: int
    function: str
    source: str
    kind: str
    op: str
    detail: str = ""
    via: str | None = None  # the library's line inside the user's, "trainer.py:12"
    inner: str | None = None  # the innermost line of torch itself
    node: str | None = None  # in backward: the autograd node; file and line are then where it was made
    backward: str | None = None  # in backward: the line that called it
    calls: float = 0.0
    blocked_ms: float = 0.0
    waited_ms: float = 0.0  # of blocked_ms: until the GPU had done what was queued before
    max_ms: float = 0.0
    idle_ms: float = 0.0  # GPU idle when these are the only waits left
    saves_ms: float = 0.0  # how much shorter the step gets when these alone go
    ranks: list[int] = field(default_factory=list)
    excerpt: list[tuple[int, str]] = field(default_factory=list)

    @property
    def where(self) -> str:
        """Such as "train.py:12"."""
        return f"{self.file}:{self.line}"

    @property
    def advice(self) -> str:
        """What to do about it."""
        return advice(Kind(self.kind), self.detail)

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two rows the same call site."""
        return self.file, self.line, self.via, self.op, self.kind, self.detail, self.node, self.backward


@dataclass
class Slow:
    """An op that kept the host without waiting for the GPU."""

    where: str
    op: str
    calls: float
    ms: float


@dataclass
class Timeline:
    """One step, for the page: times in ms from its start."""

    length_ms: float
    waits: list[tuple[float, float, int]]  # start, end, index of the row
    busy: list[tuple[float, float]]  # the GPU at work


@dataclass
class Truth:
    """What torch.profiler saw over further steps: every CUDA call that blocks, by name and function."""

    steps: int
    calls: dict[str, float] = field(default_factory=dict)  # a step
    blocked_ms: dict[str, float] = field(default_factory=dict)
    idle_ms: float = 0.0
    unmatched: list[tuple[str, str, float, float]] = field(default_factory=list)  # call, function, calls, ms


@dataclass
class Report:
    """What `find_syncs` found.

    `rows` are ranked by the GPU idle that they cause. `step_ms` is the measured step of the host, and `own_ms` the part
    of it that the measuring takes. `alone_ms` is a step without that, 0 if none followed, and `replay_ms` what the
    model makes of one, the GPU's work to its end included, `free_ms` the same without any wait. `model_error` is how
    far the model is off the measured time; if that is much, idle and savings are not to be trusted.
    """

    rows: list[Row] = field(default_factory=list)
    slow: list[Slow] = field(default_factory=list)
    steps: int = 0
    step_ms: float = 0.0
    own_ms: float = 0.0
    alone_ms: float = 0.0
    replay_ms: float = 0.0
    free_ms: float = 0.0
    model_error: float = 0.0
    busy_ms: float = 0.0
    probe_ms: float = 0.0
    ranks: int = 1
    device: str = ""
    torch: str = ""
    notes: list[str] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    truth: Truth | None = None

    @property
    def calls(self) -> float:
        """Waits a step, of one rank."""
        return sum(row.calls for row in self.rows)

    @property
    def blocked_ms(self) -> float:
        """Host time a step in which the host did nothing but wait."""
        return sum(row.blocked_ms for row in self.rows)

    def share(self, row: Row) -> float:
        """The part of the step that a row blocks."""
        return row.blocked_ms / self.step_ms if self.step_ms > 0 else 0.0

    def rank_rows(self) -> None:
        """Sorts by GPU idle caused, then by time blocked, then by calls; timelines follow."""
        order = sorted(
            range(len(self.rows)),
            key=lambda i: (-round(self.rows[i].idle_ms, 3), -round(self.rows[i].blocked_ms, 3), -self.rows[i].calls),
        )
        place = {old: new for new, old in enumerate(order)}
        self.rows = [self.rows[i] for i in order]
        for timeline in self.timelines:
            timeline.waits = [(start, end, place[row]) for start, end, row in timeline.waits]

    def by_call_site(self) -> dict[str, list[Row]]:
        """The rows of each line of the user's code."""
        sites: dict[str, list[Row]] = {}
        for row in self.rows:
            sites.setdefault(row.where, []).append(row)
        return sites

    def table(self, top: int = 20, width: int | None = None) -> str:
        """The table as text. Needs rich."""
        from . import table

        return table.text(self, top, width)

    def to_html(self, path: str | Path | None = None) -> str:
        """The page, self-contained; also written to `path` if one is given."""
        from . import page

        text = page.render(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_json(self, path: str | Path | None = None) -> str:
        """JSON of everything in the report; also written to `path` if one is given."""
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: it is not such a report.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a report of find_syncs: {error}") from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f'not a report of find_syncs: expected an object with "format": "{FORMAT}"')
        try:
            truth = data.pop("truth")
            rows, slow, timelines = data.pop("rows"), data.pop("slow"), data.pop("timelines")
            report = cls(**data)
            report.rows = [
                Row(**{**row, "excerpt": [(int(n), str(text)) for n, text in row["excerpt"]]}) for row in rows
            ]
            for row in report.rows:
                Kind(row.kind)
            report.slow = [Slow(**entry) for entry in slow]
            report.timelines = [
                Timeline(t["length_ms"], [(a, b, int(r)) for a, b, r in t["waits"]], [(a, b) for a, b in t["busy"]])
                for t in timelines
            ]
            if truth is not None:
                truth["unmatched"] = [(call, where, calls, ms) for call, where, calls, ms in truth["unmatched"]]
                report.truth = Truth(**truth)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a report of find_syncs that this version reads: {error!r}") from error
        return report


def merge(reports: Sequence[Report]) -> Report:
    """One report of several ranks. Figures of a row are the mean over the ranks; `max_ms` is the maximum.

    A collective makes every rank wait for the slowest, so the step is that of the slowest rank. Timelines and the
    profiler's view are those of the first report.

    Raises:
        ValueError: there are no reports.
    """
    if not reports:
        raise ValueError("merge: expected at least one report, got none")
    count = len(reports)
    if count == 1:
        return reports[0]
    merged: dict[tuple[Any, ...], Row] = {}
    place: list[dict[int, tuple[Any, ...]]] = []
    for rank, report in enumerate(reports):
        place.append({})
        for index, row in enumerate(report.rows):
            place[-1][index] = row.key
            into = merged.get(row.key)
            if into is None:
                into = merged[row.key] = dataclasses.replace(
                    row, calls=0.0, blocked_ms=0.0, waited_ms=0.0, max_ms=0.0, idle_ms=0.0, saves_ms=0.0, ranks=[]
                )
            for name in ("calls", "blocked_ms", "waited_ms", "idle_ms", "saves_ms"):
                setattr(into, name, getattr(into, name) + getattr(row, name) / count)
            into.max_ms = max(into.max_ms, row.max_ms)
            into.ranks.extend(row.ranks or [rank])
    first = max(reports, key=lambda report: report.step_ms)
    rows = list(merged.values())
    index_of = {row.key: index for index, row in enumerate(rows)}
    result = Report(
        rows=rows,
        slow=first.slow,
        steps=min(report.steps for report in reports),
        step_ms=first.step_ms,
        own_ms=first.own_ms,
        alone_ms=first.alone_ms,
        replay_ms=first.replay_ms,
        free_ms=max(report.free_ms for report in reports),
        model_error=max((report.model_error for report in reports), key=abs),
        busy_ms=sum(report.busy_ms for report in reports) / count,
        probe_ms=first.probe_ms,
        ranks=sum(report.ranks for report in reports),
        device=reports[0].device,
        torch=reports[0].torch,
        notes=list(dict.fromkeys(note for report in reports for note in report.notes)),
        truth=reports[0].truth,
    )
    result.timelines = [
        Timeline(t.length_ms, [(a, b, index_of[place[0][row]]) for a, b, row in t.waits], t.busy)
        for t in reports[0].timelines
    ]
    result.rank_rows()
    return result
