"""Names beside the points of a plot, placed so that none covers another, a marker or a line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Of boxes (left, bottom, right, top) or of lines (x, y of one end, x, y of the other), in points (1/72 inch).
_Array = np.ndarray[Any, Any]

# What stays free around a name and a marker: text is a little wider at some resolutions.
_PAD = 1.5
# From the marker's edge to the name. The first needs no line to tell whose name it is.
_REACHES = (3.0, 8.0, 14.0, 21.0, 29.0, 38.0, 48.0, 59.0, 71.0, 84.0, 98.0)
# Upper right first, where two places are as good.
_ANGLES = [math.radians(22.5 * i) for i in (1, 0, 15, 2, 14, 7, 8, 9, 6, 10, 4, 12, 3, 5, 13, 11)]
# What a fault costs, in points of distance: a name that covers something never wins over one far away.
_OUTSIDE, _COVERS, _LINE_OVER_NAME, _LINES_CROSS, _NAME_ON_CURVE = 10000.0, 1000.0, 200.0, 60.0, 25.0


@dataclass(frozen=True)
class Label:
    """A name, the point that it is for, in data coordinates, and the radius of that point's marker in points."""

    name: str
    point: tuple[float, float]
    radius: float
    style: dict[str, Any]


def _meet(a: _Array, b: _Array) -> _Array:
    """Whether boxes overlap."""
    return (a[..., :2] < b[..., 2:]).all(-1) & (b[..., :2] < a[..., 2:]).all(-1)


def _cross(a: _Array, b: _Array) -> _Array:
    """Whether lines cross."""

    def side(line: _Array, end: _Array) -> _Array:
        run, to = line[..., 2:] - line[..., :2], end - line[..., :2]
        return run[..., 0] * to[..., 1] - run[..., 1] * to[..., 0]

    apart = side(a, b[..., :2]) * side(a, b[..., 2:]) < 0
    return apart & (side(b, a[..., :2]) * side(b, a[..., 2:]) < 0)


def _hit(box: _Array, line: _Array) -> _Array:
    """Whether lines enter boxes: they start in them or cross a diagonal."""
    return _meet(box, line[..., [0, 1, 0, 1]]) | _cross(box, line) | _cross(box[..., [0, 3, 2, 1]], line)


@dataclass(frozen=True)
class _Spots:
    """Places for a name: boxes, lines from the point to their edge, and what each costs on its own."""

    boxes: _Array
    lines: _Array
    cost: _Array

    def clash(self, boxes: _Array, lines: _Array) -> _Array:
        """What each costs beside the names there, which have these boxes and lines."""
        mine, line = self.boxes[:, None], self.lines[:, None]
        over = 1.0 * _hit(mine, lines) + _hit(boxes, line)
        return (_COVERS * _meet(mine, boxes) + _LINE_OVER_NAME * over + _LINES_CROSS * _cross(line, lines)).sum(1)


def _spots(at: _Array, radius: float, size: _Array, frame: _Array, markers: _Array, curves: _Array) -> _Spots:
    boxes, lines, cost = [], [], []
    for reach, (rank, angle) in itertools.product(_REACHES, enumerate(_ANGLES)):
        towards = np.array((math.cos(angle), math.sin(angle)))
        # The name lies beyond this end of the line, which is on its edge.
        end = at + (radius + reach) * towards
        corner = end - size * (0.5 - 0.5 * np.clip(1.5 * towards, -1, 1))
        boxes.append((*(corner - _PAD), *(corner + size + _PAD)))
        lines.append((*at, *end))
        cost.append(reach + 0.2 * rank)
    box, line = np.array(boxes), np.array(lines)
    out = np.maximum(frame[:2] - box[:, :2], box[:, 2:] - frame[2:]).max(1)
    # A line to a point in the middle of another marker cannot miss that one.
    others = markers[np.hypot(*((markers[:, :2] + markers[:, 2:]) / 2 - at).T) > radius]
    own = np.array(cost) + (out > 0) * (_OUTSIDE + out)
    own += _COVERS * _meet(box[:, None], markers).sum(1) + _LINES_CROSS * _hit(others, line[:, None]).sum(1)
    return _Spots(box, line, own + _NAME_ON_CURVE * _hit(box[:, None], curves).sum(1))


def _settle(choices: Sequence[_Spots]) -> list[int]:
    """The spot of each name: in turn each takes the cheapest, given those of the others, until none moves any more.

    What comes of this depends on the order of the turns: each name has the first one once, and the best outcome wins.
    """
    best: tuple[float, list[int]] = (math.inf, [])
    count = len(choices)
    for start in range(count):
        taken: dict[int, int] = {}
        for _ in range(20):
            before, total = dict(taken), 0.0
            for i in ((start + k) % count for k in range(count)):
                rest = [(choices[j], spot) for j, spot in taken.items() if j != i]
                boxes = np.array([c.boxes[spot] for c, spot in rest]).reshape(-1, 4)
                lines = np.array([c.lines[spot] for c, spot in rest]).reshape(-1, 4)
                clash = choices[i].clash(boxes, lines)
                taken[i] = int((choices[i].cost + clash).argmin())
                # Each clash is that of two.
                total += float(choices[i].cost[taken[i]] + clash[taken[i]] / 2)
            if taken == before:
                break
        best = min(best, (total, [taken[i] for i in range(count)]))
    return best[1]


def place(axis: Any, labels: Sequence[Label], curves: Sequence[Sequence[tuple[float, float]]] = ()) -> None:
    """Write each name near its point; one that had to move away is tied to its point by a thin line.

    Args:
        axis: with its limits and scales final.
        labels: what to write.
        curves: in data coordinates, which names should not lie on.
    """
    renderer = axis.figure.canvas.get_renderer()
    unit = axis.figure.dpi / 72
    frame = axis.get_window_extent(renderer).extents / unit
    centres = axis.transData.transform([label.point for label in labels]) / unit
    reach = np.array([[label.radius + _PAD] for label in labels])
    markers = np.hstack((centres - reach, centres + reach))
    paths = [axis.transData.transform(curve) / unit for curve in curves]
    segments = np.vstack([np.empty((0, 4)), *(np.hstack((path[:-1], path[1:])) for path in paths)])
    choices = []
    for label, centre in zip(labels, centres, strict=True):
        probe = axis.text(*label.point, label.name, **label.style)
        size = probe.get_window_extent(renderer).size / unit
        probe.remove()
        choices.append(_spots(centre, label.radius, size, frame, markers, segments))
    for label, spots, spot, centre in zip(labels, choices, _settle(choices), centres, strict=True):
        box, end = spots.boxes[spot], spots.lines[spot, 2:]
        arrow = {"arrowstyle": "-", "color": label.style["color"], "linewidth": 0.6, "shrinkA": 0.5}
        # From where the line meets the name to the edge of the marker.
        corner = box[:2] + _PAD
        arrow |= {"relpos": (end - corner) / (box[2:] - _PAD - corner), "shrinkB": label.radius - 0.5}
        far = math.dist(centre, end) > label.radius + _REACHES[0] + 1
        axis.annotate(
            label.name,
            label.point,
            textcoords="offset points",
            xytext=corner - centre,
            ha="left",
            va="bottom",
            arrowprops=arrow if far else None,
            **label.style,
        )
