"""The report as one HTML page that needs nothing else: no network, no files, no libraries."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from .report import Report, Row, Timeline
from .table import headline, number, place, remarks, share

_WIDTH = 1000.0  # of a timeline, in its own units


def render(report: Report) -> str:
    """The page."""
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    parts = {
        "HEADLINE": escape(headline(report)),
        "FACTS": _facts(report),
        "TIMELINES": _timelines(report),
        "ROWS": "\n".join(_row(index, row, report) for index, row in enumerate(report.rows)),
        "EMPTY": "" if report.rows else '<p class="empty">No line made the host wait.</p>',
        "SLOW": _slow(report),
        "REMARKS": "".join(f"<li>{escape(line)}</li>" for line in remarks(report)),
    }
    for name, text in parts.items():
        template = template.replace(f"<!-- {name} -->", text)
    return template


def _facts(report: Report) -> str:
    facts = [
        ("step", f"{report.step_ms:.2f} ms"),
        ("host waits", f"{report.blocked_ms:.2f} ms"),
        ("GPU busy", f"{report.busy_ms:.2f} ms"),
        ("waits a step", number(report.calls)),
    ]
    if not report.probe_ms:
        facts.insert(3, ("without waits", f"{report.free_ms:.2f} ms"))
    if report.alone_ms:
        facts.insert(1, ("without measuring", f"{report.alone_ms:.2f} ms"))
    if report.ranks > 1:
        facts.append(("ranks", str(report.ranks)))
    for name, value in (("device", report.device), ("torch", report.torch)):
        if value:
            facts.append((name, value))
    return "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)


def _kind(row: Row) -> str:
    return row.kind.replace(" ", "-")


def _timelines(report: Report) -> str:
    if not report.timelines:
        return '<p class="empty">No step was recorded.</p>'
    longest = max(timeline.length_ms for timeline in report.timelines) or 1.0
    return "\n".join(
        f"<figure><figcaption>step {index + 1}, {timeline.length_ms:.2f} ms</figcaption>"
        f"{_svg(timeline, longest, report)}</figure>"
        for index, timeline in enumerate(report.timelines)
    )


def _svg(timeline: Timeline, longest: float, report: Report) -> str:
    def bar(start: float, end: float, y: int, height: int, least: float = 0.4) -> str:
        x, width = start / longest * _WIDTH, max(least, (end - start) / longest * _WIDTH)
        return f'x="{x:.2f}" width="{width:.2f}" y="{y}" height="{height}"'

    shapes = [f'<rect class="track" {bar(0, timeline.length_ms, 2, 16)}/>']
    for start, end, index in timeline.waits:
        row = report.rows[index]
        shapes.append(
            f'<rect class="wait {_kind(row)}" data-row="{index}" {bar(start, end, 2, 16, 1.2)}>'
            f"<title>{escape(place(row))}\n{escape(row.kind)}, {end - start:.3f} ms at {start:.3f} ms</title></rect>"
        )
    shapes.append(f'<rect class="track" {bar(0, timeline.length_ms, 22, 16)}/>')
    shapes += [f'<rect class="busy" {bar(start, end, 22, 16)}/>' for start, end in timeline.busy]
    return (
        f'<svg viewBox="0 0 {_WIDTH:.0f} 40" preserveAspectRatio="none" role="img" '
        f'aria-label="Host waits above, GPU work below">{"".join(shapes)}</svg>'
    )


def _row(index: int, row: Row, report: Report) -> str:
    cost = ("–", "–") if report.probe_ms else (f"{row.idle_ms:.3f}", f"{row.saves_ms:.3f}")
    cells = [
        *cost,
        f"{row.blocked_ms:.3f}",
        share(row.blocked_ms, report.step_ms),
        f"{row.max_ms:.3f}",
        number(row.calls),
    ]
    largest = max((r.idle_ms for r in report.rows), default=0.0)
    width = 100 * row.idle_ms / largest if largest > 0 and not report.probe_ms else 0
    figures = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    details = [("op", row.op), ("detail", row.detail), ("torch", row.inner or ""), ("in", row.function)]
    if report.ranks > 1:
        details.append(("ranks", ", ".join(map(str, row.ranks))))
    about = "".join(f"<span><b>{name}</b> {escape(value)}</span>" for name, value in details if value)
    excerpt = "\n".join(
        f'<span class="{"hit" if number == row.line else ""}"><i>{number:5d}</i> {escape(text)}</span>'
        for number, text in row.excerpt
    )
    source = f"<pre>{excerpt}</pre>" if excerpt else ""
    return (
        f'<tbody data-row="{index}" tabindex="0"><tr>{figures}'
        f'<td><span class="tag {_kind(row)}">{escape(row.kind)}</span></td>'
        f'<td class="line"><code>{escape(place(row))}</code>'
        f'<span class="bar"><span style="width:{width:.1f}%"></span></span></td></tr>'
        f'<tr class="more"><td colspan="8"><div>{source}<p class="advice">{escape(row.advice)}</p>'
        f'<p class="about">{about}</p></div></td></tr></tbody>'
    )


def _slow(report: Report) -> str:
    if not report.slow:
        return ""
    rows = "".join(
        f"<tr><td>{op.ms:.3f}</td><td>{number(op.calls)}</td><td><code>{escape(op.op)}</code></td>"
        f"<td><code>{escape(op.where)}</code></td></tr>"
        for op in report.slow[:10]
    )
    return (
        "<h2>Slow without waiting for the GPU</h2><p>The host spent this time in the op itself: a first call, an "
        "allocation, a full launch queue.</p><table class='slow'><thead><tr><th>ms a step</th><th>calls</th><th>op</th>"
        f"<th>line</th></tr></thead><tbody>{rows}</tbody></table>"
    )
