"""Names beside the points of a plot, placed so that they do not cover one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# In points: directions to try, near ones first.
_OFFSETS = [
    (dx * reach, dy * reach, align)
    for reach in (1.0, 1.9, 2.9, 4.0, 5.2)
    for dx, dy, align in (
        (6, 5, "left"),
        (6, -11, "left"),
        (-6, 5, "right"),
        (-6, -11, "right"),
        (0, 9, "center"),
        (0, -16, "center"),
    )
]


def place(
    axis: Any, points: Sequence[tuple[float, float]], names: Sequence[str], styles: Sequence[dict[str, Any]]
) -> None:
    """Annotate each point; a name that had to move away is tied to its point by a thin line.

    Args:
        axis: with its limits and scales final.
        points: in data coordinates.
        names: what to write.
        styles: of each text: color, fontweight, fontsize. Those that come first get the better places.
    """
    figure = axis.figure
    renderer = figure.canvas.get_renderer()
    pixels = [axis.transData.transform(p) for p in points]
    unit = figure.dpi / 72
    taken: list[tuple[float, float, float, float]] = [(x - 4, y - 4, x + 4, y + 4) for x, y in pixels]
    frame = axis.get_window_extent(renderer)
    for point, (x, y), name, style in zip(points, pixels, names, styles, strict=True):
        probe = axis.annotate(name, point, textcoords="offset points", xytext=(0, 0), **style)
        extent = probe.get_window_extent(renderer)
        probe.remove()
        width, height = extent.width, extent.height
        best: tuple[float, float, str] | None = None
        least = float("inf")
        box = (0.0, 0.0, 0.0, 0.0)
        for dx, dy, align in _OFFSETS:
            left = x + dx * unit - {"left": 0.0, "right": width, "center": width / 2}[align]
            bottom = y + dy * unit
            candidate = (left, bottom, left + width, bottom + height)
            outside = max(0.0, frame.x0 - left, left + width - frame.x1, frame.y0 - bottom, bottom + height - frame.y1)
            cost = sum(_overlap(candidate, other) for other in taken) + 1e4 * outside
            if cost < least:
                best, least, box = (dx, dy, align), cost, candidate
            if cost == 0:
                break
        if best is None:
            continue
        dx, dy, align = best
        far = abs(dx) > 12 or abs(dy) > 17
        arrow = {"arrowstyle": "-", "color": style["color"], "linewidth": 0.5, "shrinkB": 2} if far else None
        axis.annotate(name, point, textcoords="offset points", xytext=(dx, dy), ha=align, arrowprops=arrow, **style)
        taken.append(box)


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
