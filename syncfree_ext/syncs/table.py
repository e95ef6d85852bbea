"""The report in the terminal. Needs rich."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from .report import Report, Row

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

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
        text += f" Without any wait a step would be {saved:.2f} ms ({share(saved, report.step_ms)}) shorter."
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
        off = (report.replay_ms - report.step_ms) / report.step_ms if report.step_ms > 0 else 0.0
        lines.append(f"The model's step is {report.replay_ms:.2f} ms, {100 * off:+.0f} % off the measured one.")
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


def render(report: Report, top: int = 20) -> RenderableType:
    """The report as something that rich prints.

    Raises:
        ImportError: rich is not installed.
    """
    try:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ImportError(_NEEDS_RICH) from error

    parts: list[RenderableType] = [Text(headline(report), style="bold")]
    if report.rows:
        table = Table(show_edge=False, pad_edge=False, header_style="bold", row_styles=["", ""], padding=(0, 1))
        for title, justify in (("GPU idle ms", "right"), ("saves ms", "right"), ("blocked ms", "right")):
            table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        table.add_column("step", justify="right", no_wrap=True)
        table.add_column("max ms", justify="right", no_wrap=True)
        table.add_column("calls", justify="right", no_wrap=True)
        table.add_column("kind", no_wrap=True)
        table.add_column("line", overflow="fold", ratio=1)
        for row in report.rows[:top]:
            line = Text(place(row), style="bold")
            if row.source:
                line.append("\n  " + row.source, style="not bold dim")
            line.append("\n  → " + row.advice, style="not bold")
            cost = ["–", "–"] if report.probe_ms else [f"{row.idle_ms:.3f}", f"{row.saves_ms:.3f}"]
            table.add_row(
                *cost,
                f"{row.blocked_ms:.3f}",
                share(row.blocked_ms, report.step_ms),
                f"{row.max_ms:.3f}",
                number(row.calls),
                Text(row.kind, style=COLOURS[row.kind]),
                line,
            )
        parts += [Text(""), table]
        if len(report.rows) > top:
            parts.append(Text(f"… and {len(report.rows) - top} more lines", style="dim"))
        parts += [
            Text(""),
            Text(
                "GPU idle: a step, if only these waits are left. saves: a step is that much shorter if only they go.",
                style="dim",
            ),
        ]
    if report.slow:
        slow = ", ".join(f"{op.op} at {op.where} ({op.ms:.2f} ms)" for op in report.slow[:3])
        parts.append(Text(f"Slow without waiting for the GPU: {slow}.", style="dim"))
    parts += [Text(line, style="dim") for line in remarks(report)]
    return Group(*parts)


def text(report: Report, top: int = 20, width: int | None = None) -> str:
    """The table as plain text, `width` columns wide (default: the terminal's)."""
    rendered = render(report, top)
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, record=False, color_system=None)
    console.print(rendered)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def svg(report: Report, top: int = 20, width: int = 130, title: str = "syncfree syncs") -> str:
    """The table as a picture."""
    rendered = render(report, top)
    from rich.console import Console

    console: Console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True)
    console.print(rendered)
    return console.export_svg(title=title)
