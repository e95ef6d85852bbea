"""The report in the terminal. Needs rich."""

from __future__ import annotations

import io
import shutil
from typing import TYPE_CHECKING

from .report import Report, Row

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

# Columns from which figures, kind and line fit beside each other.
_WIDE = 116
_NEEDS_RICH = 'the table needs rich: pip install "syncfree_ext[syncs]"'

COLOURS = {
    "scalar read": "magenta",
    "pageable copy": "yellow",
    "dynamic shape": "cyan",
    "explicit": "blue",
    "collective": "green",
    "allocator": "red",
    "inside an op": "bright_black",
}


def headline(report: Report) -> str:
    """One sentence with the totals."""
    if not report.steps:
        return "Nothing was measured."
    step = f"{report.steps} steps of {report.step_ms:.2f} ms"
    if not report.rows:
        return f"The host never waited for the GPU in {step}."
    text = (
        f"The host waited {number(report.calls)} times a step, {report.blocked_ms:.2f} of {report.step_ms:.2f} ms "
        f"({share(report.blocked_ms, report.step_ms)})."
    )
    if not report.probe_ms:
        saved = max(0.0, report.replay_ms - report.free_ms)
        text += f" Without any wait a step would be {saved:.2f} ms ({share(saved, report.replay_ms)}) shorter."
    return text


def number(value: float) -> str:
    """A count without needless decimals."""
    return f"{value:.0f}" if abs(value - round(value)) < 0.05 else f"{value:.1f}"


def share(part: float, whole: float) -> str:
    """A percentage."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else "–"


def place(row: Row) -> str:
    """Where a row is, with the library's line or the autograd node behind it."""
    text = row.where
    if row.via:
        text += f" via {row.via}"
    if row.node:
        text += f" backward of {row.node}" + (f", called at {row.backward}" if row.backward else "")
    return text


def remarks(report: Report) -> list[str]:
    """What the reader must know to trust the figures."""
    lines = list(report.notes)
    if report.probe_ms:
        lines.append(
            f"{report.probe_ms:.0f} ms of work were queued before each step so that every wait shows: read calls and "
            "kinds, not costs."
        )
    elif report.steps and report.rows:
        error = round(100 * report.model_error, 1) + 0.0  # no minus before a zero
        lines.append(f"The model behind these figures is {error:+.1f} % off the measured time.")
        if report.own_ms > 0.01 * report.step_ms:
            alone = f", of which the shortest took {report.alone_ms:.2f} ms" if report.alone_ms else ""
            lines.append(
                f"Measuring takes {report.own_ms:.2f} ms of the {report.step_ms:.2f} ms; costs are those of a step "
                f"without it{alone}."
            )
    if report.truth is not None:
        truth = report.truth
        blocked = sum(truth.blocked_ms.values())
        lines.append(
            f"torch.profiler, over {truth.steps} more steps: {number(sum(truth.calls.values()))} blocking CUDA calls a "
            f"step, {blocked:.2f} ms, the GPU idle for {truth.idle_ms:.2f} ms after them."
        )
        for name, where, calls, ms in truth.unmatched[:5]:
            lines.append(f"No row above: {name} in {where}, {number(calls)} a step, {ms:.2f} ms.")
    return lines


def render(report: Report, top: int = 20, width: int = _WIDE) -> RenderableType:
    """The report as something that rich prints, for a terminal of so many columns.

    Raises:
        ImportError: rich is not installed.
    """
    try:
        from rich.console import Group
        from rich.text import Text
    except ImportError as error:
        raise ImportError(_NEEDS_RICH) from error

    parts: list[RenderableType] = [Text(headline(report), style="bold")]
    if report.rows:
        rows = report.rows[:top]
        parts += [Text(""), _table(report, rows)] if width >= _WIDE else _blocks(report, rows)
        if len(report.rows) > top:
            parts.append(Text(f"… and {len(report.rows) - top} more lines", style="dim"))
        parts.append(Text(""))
        parts += [Text.assemble((row.kind, COLOURS[row.kind]), f" → {row.advice}") for row in _advised(rows)]
        if not report.probe_ms:
            parts.append(
                Text(
                    "\nGPU idle: a step, if only these waits are left. Saves: how much shorter a step is without them.",
                    style="dim",
                )
            )
    if report.slow:
        slow = ", ".join(f"{op.op} at {op.where} ({op.ms:.2f} ms)" for op in report.slow[:3])
        parts.append(Text(f"Slow without waiting for the GPU: {slow}.", style="dim"))
    parts += [Text(line, style="dim") for line in remarks(report)]
    return Group(*parts)


def _advised(rows: list[Row]) -> list[Row]:
    """The first row with each advice."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row.advice, row)
    return list(first.values())


def _line(row: Row, indent: str) -> Text:
    from rich.text import Text

    line = Text(place(row), style="bold")
    if row.source:
        line.append(f"\n{indent}{row.source}", style="not bold dim")
    return line


def _table(report: Report, rows: list[Row]) -> Table:
    """Figures, kind and line beside each other."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", padding=(0, 1))
    for title in ("GPU idle ms", "saves ms", "blocked ms", "step", "max ms", "calls"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("line", overflow="fold", ratio=1)
    for row in rows:
        cost = ["–", "–"] if report.probe_ms else [f"{row.idle_ms:.3f}", f"{row.saves_ms:.3f}"]
        table.add_row(
            *cost,
            f"{row.blocked_ms:.3f}",
            share(row.blocked_ms, report.step_ms),
            f"{row.max_ms:.3f}",
            number(row.calls),
            Text(row.kind, style=COLOURS[row.kind]),
            _line(row, "  "),
        )
    return table


def _blocks(report: Report, rows: list[Row]) -> list[RenderableType]:
    """The same in a narrow terminal, such as the log of a CI."""
    from rich.padding import Padding
    from rich.text import Text

    blocks: list[RenderableType] = []
    for row in rows:
        cost = "" if report.probe_ms else f"GPU idle {row.idle_ms:.3f} ms, saves {row.saves_ms:.3f} ms, "
        figures = (
            f"{cost}blocked {row.blocked_ms:.3f} ms ({share(row.blocked_ms, report.step_ms)}), "
            f"max {row.max_ms:.3f} ms, {number(row.calls)} a step"
        )
        blocks += [
            Text(""),
            Text.assemble((row.kind, COLOURS[row.kind]), "  ", figures),
            Padding(_line(row, ""), (0, 0, 0, 2)),
        ]
    return blocks


def text(report: Report, top: int = 20, width: int | None = None) -> str:
    """The table as plain text, `width` columns wide (default: the terminal's)."""
    width = width or shutil.get_terminal_size().columns
    rendered = render(report, top, width)
    from rich.console import Console

    output = io.StringIO()
    Console(file=output, width=width, color_system=None).print(rendered)
    return output.getvalue()


def svg(report: Report, top: int = 20, width: int = 130, title: str = "syncfree syncs") -> str:
    """The table as a picture."""
    rendered = render(report, top, width)
    from rich.console import Console

    console: Console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True)
    console.print(rendered)
    return console.export_svg(title=title)
