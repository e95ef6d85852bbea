"""The plots, as PNG and SVG on a transparent ground, in tones that can be read on a light and on a dark page."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .results import Record

GREY = "#7a838e"
GRID = "#7a838e40"
_OURS = "#e8590c"
# Inches. It is as wide as GitHub shows a README, 830 px of 1/96 inch: text keeps its size there.
_WIDTH = 8.6
# Colour, marker and line style of each head. Those of a family are akin in colour and differ in the rest. All colours
# are about as far from white as from GitHub's dark grey.
_LOOKS = {
    "syncfree": (_OURS, "D", "-"),
    "syncfree-lean": (_OURS, "D", "--"),
    "torch": ("#3c7fcc", "o", "-"),
    "torch-fp32": ("#3c7fcc", "s", "--"),
    "torch-compile": ("#5779d5", "^", "-"),
    "torch-lce": ("#3b85a2", "v", ":"),
    "liger": ("#2a8d55", "o", "-"),
    "liger-c8": ("#1c8b79", "s", "-"),
    "liger-c16": ("#1c8b79", "^", "--"),
    "liger-fp32": ("#478b36", "P", "-."),
    "liger-c8-fp32": ("#478b36", "X", ":"),
    "liger-sm90": ("#7a8315", "v", "-"),
    "cce": ("#9269c3", "o", "-"),
    "cce-exact": ("#9365d4", "s", "--"),
    "quack": ("#9d7700", "o", "-"),
    "quack-exp": ("#9d7700", "s", "--"),
    "fla": ("#c15993", "o", "-"),
}
_STYLE: dict[str, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "axes.titlecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "font.size": 10,
    "axes.titlesize": 11,
    "legend.frameon": False,
    "legend.labelcolor": GREY,
    # The same file from the same figures.
    "svg.hashsalt": "bench",
}


def is_ours(head: str) -> bool:
    return head.startswith("syncfree")


def _look(head: str) -> tuple[str, str, str]:
    return _LOOKS.get(head.partition("@")[0], (GREY, "o", "-"))


def line_style(head: str) -> dict[str, Any]:
    colour, marker, style = _look(head)
    return {
        "color": colour,
        "linewidth": 2.4 if is_ours(head) else 1.3,
        "linestyle": style,
        "marker": marker,
        "markersize": 6 if is_ours(head) else 5,
        # A head with a chunk of its own.
        "markerfacecolor": "none" if "@" in head else colour,
        "zorder": 5 if is_ours(head) else 3,
        "label": head,
    }


def _legend(axis: Any, axes: Sequence[Any] = ()) -> None:
    """Beside the plot, where it covers nothing, in the order in which the lines end, from the top; those of other plots
    with it, once each.
    """
    lines = {line.get_label(): line for a in (*axes[::-1], axis) for line in a.get_lines()}.values()
    lines = sorted(lines, key=lambda line: -line.get_ydata()[-1])
    # Long enough for a dash-dotted line.
    axis.legend(handles=lines, loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=9, handlelength=3.2)


def _height(lines: int) -> float:
    """Of a plot with so many lines: its legend must fit beside it."""
    return max(4.4, 0.6 + 0.2 * lines)


def _median(value: Any) -> float:
    return float(value["median"] if isinstance(value, dict) else value)


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other point beats or equals in both coordinates, by rising x."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(points)):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def _ok(data: dict[str, Any], routine: str, *needed: str) -> list[Record]:
    return [
        r for r in data["records"] if r["routine"] == routine and r["status"] == "ok" and all(n in r for n in needed)
    ]


def _device(data: dict[str, Any]) -> str:
    return ", ".join(sorted({e["device"] for e in data["environments"].values()}))


def _unique(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


# Heads this many times slower than the fastest sit on the upper edge, with their figure beside their name: what matters
# is the order of those that are close.
_CLIP = 1.75
# In points.
_RADIUS_OURS, _RADIUS = 5.5, 3.2


def _batches(records: Sequence[Record]) -> list[list[Record]]:
    """Those of each shape, dtype and data set."""
    keys = [(r["shape"], r["dtype"], r["data"]) for r in records]
    return [[r for r, k in zip(records, keys, strict=True) if k == key] for key in _unique(keys)]


@dataclass(frozen=True)
class _Panel:
    """Heads as points: memory and time, the latter as a ratio to the limit where that is known."""

    records: list[Record]

    @property
    def relative(self) -> bool:
        return all("x_limit" in r for r in self.records)

    @property
    def times(self) -> list[float]:
        return [r["x_limit"] if self.relative else _median(r["train_ms"]) for r in self.records]

    @property
    def edge(self) -> float:
        """The time at which points are held back."""
        return min(max(self.times), _CLIP * min(self.times))

    @property
    def points(self) -> list[tuple[float, float]]:
        return [(r["peak_mib"], min(t, self.edge)) for r, t in zip(self.records, self.times, strict=True)]

    @property
    def front(self) -> list[tuple[float, float]]:
        """The corners of the line through those that none beats."""
        best = pareto([(r["peak_mib"], t) for r, t in zip(self.records, self.times, strict=True)])
        held = [(x, min(y, self.edge)) for x, y in best]
        steps = [(after[0], before[1]) for before, after in itertools.pairwise(held)]
        return [corner for pair in itertools.zip_longest(held, steps) for corner in pair if corner is not None]


def _pareto_figure(plt: Any, records: Sequence[Record], where: str) -> Any:
    """Time against peak memory, a panel for each batch; the front of all heads is drawn through."""
    panels = [_Panel(batch) for batch in _batches(records)]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(_WIDTH, 0.4 + 4.0 * rows), squeeze=False)
    held = any(t > panel.edge for panel in panels for t in panel.times)
    note = f"{where}. Lower left is better" + "; ▲ lie above, at the time beside their name." * held
    figure.suptitle(f"Forward and backward: time against memory\n{note}", x=0.01, ha="left", fontsize=11)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _pareto_panel(axis, panel)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    # Where the names fit depends on where everything else is.
    figure.tight_layout()
    figure.canvas.draw()
    for axis, panel in zip(axes.flat, panels, strict=False):
        _pareto_names(axis, panel)
    return figure


def _pareto_panel(axis: Any, panel: _Panel) -> None:
    axis.plot(*zip(*panel.front, strict=True), color=GREY, linewidth=1, linestyle=":", zorder=2)
    for record, (x, y), time in zip(panel.records, panel.points, panel.times, strict=True):
        ours = is_ours(record["head"])
        marker = "^" if time > panel.edge else "D" if ours else "o"
        size = (8.0 if ours else 2 * _RADIUS) ** 2
        axis.scatter(x, y, s=size, color=_look(record["head"])[0], marker=marker, zorder=4)
    if panel.relative:
        axis.axhline(1.0, color=GREY, linewidth=1)
    axis.set_xscale("log")
    low, high = min(x for x, _ in panel.points), max(x for x, _ in panel.points)
    left, right = low / 1.3, high * 1.35
    axis.set_xlim(left, right)
    # Few enough for their figures to stay apart.
    steps = (1, 2, 3, 5) if right / left < 30 else (1, 2, 5) if right / left < 100 else (1, 3)
    ticks = [m * 10**e for e in range(7) for m in steps]
    axis.set_xticks([t for t in ticks if left <= t <= right], minor=False)
    axis.minorticks_off()
    axis.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    # Names of the lowest and the highest points lie beyond these.
    bottom = min(1.0, *panel.times) if panel.relative else min(panel.times)
    room = 0.12 * (panel.edge - bottom) or 0.1 * bottom
    axis.set_ylim(bottom - 1.7 * room, panel.edge + room)
    axis.set_yticks([t for t in axis.get_yticks() if bottom - room <= t <= panel.edge])
    first = panel.records[0]
    kind = "" if first["data"] == "unit" else f", {first['data']} data"
    size = f"{first['BT']}×{first['H']}×{first['V']}"
    axis.set_title(f"{first['shape']}  {size}, {first['dtype']}{kind}", loc="left", fontsize=10)
    axis.set_xlabel("peak memory above the inputs, MiB")
    axis.set_ylabel("time / three matrix products" if panel.relative else "forward and backward, ms")


def _pareto_names(axis: Any, panel: _Panel) -> None:
    # It needs numpy, which comes with matplotlib.
    from . import labels

    times, points = panel.times, panel.points
    order = sorted(range(len(times)), key=lambda i: (not is_ours(panel.records[i]["head"]), times[i]))
    names = []
    for i in order:
        head = panel.records[i]["head"]
        ours, held = is_ours(head), times[i] > panel.edge
        name = head + (f" {times[i]:.2f}×" if panel.relative else f" {times[i]:.0f} ms") * held
        style = {"color": _look(head)[0], "fontsize": 8, "fontweight": "bold" if ours else "normal", "zorder": 6}
        names.append(labels.Label(name, points[i], _RADIUS_OURS if ours else _RADIUS, style))
    bound = [[(x, 1.0) for x in axis.get_xlim()]] if panel.relative else []
    labels.place(axis, names, [panel.front, *bound])


def _ragged_figure(plt: Any, records: Sequence[Record], where: str) -> Any:
    """Time against the ignored share, a panel for each batch: two in a row, with one legend for all."""
    batches = _batches(records)
    columns = min(2, len(batches))
    rows = -(-len(batches) // columns)
    # Two more lines for the bound.
    height = _height(2 + len({r["head"] for r in records}))
    size = (_WIDTH, height if columns == 1 else 0.85 * height * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for axis in axes.flat[len(batches) :]:
        axis.set_axis_off()
    for axis, shown in zip(axes.flat, batches, strict=False):
        relative = all("x_limit" in r for r in shown if r["head"] != "limit")
        for head in _unique([r["head"] for r in shown if not r["head"].startswith("limit")]):
            line = sorted(
                (r["ignored"], r["x_limit"] if relative else _median(r["train_ms"])) for r in shown if r["head"] == head
            )
            axis.plot([100 * x for x, _ in line], [y for _, y in line], **line_style(head))
        if relative:
            most = max(r["ignored"] for r in shown)
            shares = [most * i / 100 for i in range(101)]
            axis.plot(
                [100 * share for share in shares],
                [1 - share for share in shares],
                color=GREY,
                linewidth=1.3,
                linestyle=":",
                zorder=6,
                label="three products of\nthe rows that count",
            )
            # Some take several times as long as the products, and what counts is below.
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
        else:
            axis.set_ylim(bottom=0)
        axis.set_xlabel("ignored targets, %")
        axis.set_ylabel("time / three matrix products" if relative else "forward and backward, ms")
        first = shown[0]
        if columns == 1:
            axis.set_title(f"{first['shape']}, {first['dtype']}: what ignored tokens cost. {where}", loc="left")
        else:
            axis.set_title(f"{first['shape']}, {first['dtype']}", loc="left")
    if columns > 1:
        figure.suptitle(f"What ignored tokens cost. {where}", x=0.01, ha="left", fontsize=11, color=GREY)
    _legend(axes[0][-1], list(axes.flat[: len(batches)]))
    figure.tight_layout()
    return figure


def _scale_figure(plt: Any, records: Sequence[Record], where: str) -> Any:
    """TFLOP/s against the rows, on one dtype and data set."""
    names = _unique([r["head"] for r in records])
    figure, axis = plt.subplots(figsize=(_WIDTH, _height(len(names))))
    for head in names:
        line = sorted((r["BT"], r["tflops"]) for r in records if r["head"] == head)
        style = line_style(head)
        if head == "limit":
            style |= {"color": GREY, "linestyle": ":", "marker": "", "label": "three matrix products"}
        axis.plot(*zip(*line, strict=True), **style)
    axis.set_xscale("log", base=2)
    axis.set_ylim(0, 1.05 * max(r["tflops"] for r in records))  # the highest mark is whole
    axis.set_xticks(sorted({r["BT"] for r in records}))
    axis.xaxis.set_major_formatter(lambda v, _: f"{v / 1024:g}k" if v >= 1024 else f"{v:g}")
    axis.set_xlabel("rows (tokens)")
    axis.set_ylabel("TFLOP/s, forward and backward")
    axis.set_title(f"{records[0]['base']}: {records[0]['H']} hidden, {records[0]['V']} classes. {where}", loc="left")
    _legend(axis)
    figure.tight_layout()
    return figure


def _backlog_figure(plt: Any, records: Sequence[Record], where: str) -> Any:
    """How long the head holds the host, and the GPU, while a copy drains; a pair of bars for each head."""
    records = [r for r in records if r["shape"] == records[0]["shape"]]
    figure, axis = plt.subplots(figsize=(_WIDTH, 1.2 + 0.56 * len(records)))
    texts = []
    for i, record in enumerate(reversed(records)):
        tone = _look(record["head"])[0]
        for offset, prefix, strength in ((0.2, "host", 1.0), (-0.2, "gpu", 0.4)):
            forward, backward = (_median(record[f"{prefix}_{part}_ms"]) for part in ("forward", "backward"))
            bar = {"height": 0.34, "color": tone, "alpha": strength}
            axis.barh(i + offset, forward, **bar)
            axis.barh(i + offset, backward, left=forward, hatch="////", edgecolor=GREY, linewidth=0, **bar)
            said = " + ".join(f"{t:.1f}" if t >= 10 else f"{t:.2f}" for t in (forward, backward))
            name = f"{prefix if prefix == 'host' else 'GPU'} {said}"
            texts.append(axis.text(forward + backward, i + offset, f" {name} ", va="center", fontsize=8))
    axis.set_yticks(range(len(records)), [r["head"] for r in reversed(records)])
    axis.grid(False, axis="y")
    axis.set_ylim(-0.6, len(records) - 0.05)
    axis.set_xlabel("ms; solid: forward, hatched: backward")
    axis.set_title(f"{records[0]['shape']}: held by the head while a copy to the host drains. {where}", loc="left")
    copy_ms = records[0].get("copy_ms", 0.0)
    if copy_ms:
        axis.axvline(copy_ms, color=GREY, linewidth=1, linestyle=":")
        texts.append(axis.text(copy_ms, len(records) - 0.3, " copy done ", va="center", fontsize=8))
    figure.tight_layout()
    _make_room(axis, texts, copy_ms)
    return figure


def _make_room(axis: Any, texts: Sequence[Any], line: float) -> None:
    """Widen a plot from 0 until all texts are in it, and move those that would lie on a vertical line behind it."""
    whole = axis.get_window_extent().width
    shares = [text.get_window_extent().width / whole for text in texts]
    # Each may have to go behind the line.
    right = max(max(text.get_position()[0], line) / (1 - share) for text, share in zip(texts, shares, strict=True))
    axis.set_xlim(0, right)
    for text, share in zip(texts, shares, strict=True):
        x = text.get_position()[0]
        if x < line < x + share * right:
            text.set_x(line)


@dataclass(frozen=True)
class _Figure:
    """What a figure shows, and how it is drawn: draw(pyplot, records, device)."""

    select: Callable[[dict[str, Any]], list[Record]]
    draw: Callable[[Any, Sequence[Record], str], Any]


FIGURES = {
    "pareto": _Figure(lambda data: _ok(data, "flce", "peak_mib", "train_ms"), _pareto_figure),
    "cpu": _Figure(lambda data: _ok(data, "cpu", "peak_mib", "train_ms"), _pareto_figure),
    "ragged": _Figure(lambda data: _ok(data, "ragged", "train_ms"), _ragged_figure),
    "scale": _Figure(lambda data: [r for r in _ok(data, "scale", "train_ms") if r["axis"] == "BT"], _scale_figure),
    "backlog": _Figure(
        lambda data: [r for r in _ok(data, "backlog", "host_forward_ms") if r["variant"] == "upstream 1"],
        _backlog_figure,
    ),
}


def drawable(data: dict[str, Any]) -> list[str]:
    """The names of the figures that the records allow."""
    return [name for name, figure in FIGURES.items() if figure.select(data)]


def draw(data: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The name and the figure of each plot that the records allow; a figure is closed when the next is asked for."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        for name in drawable(data):
            figure = FIGURES[name].draw(plt, FIGURES[name].select(data), _device(data))
            yield name, figure
            plt.close(figure)


def save_all(data: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what the records allow; the paths written, PNG and SVG of each figure."""
    written = []
    for name, figure in draw(data):
        folder.mkdir(parents=True, exist_ok=True)
        # Without the date and the version, so that the same results give the same file.
        for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            path = folder / f"{name}.{suffix}"
            figure.savefig(path, dpi=160, metadata=metadata, transparent=True)
            written.append(path)
    return written
