"""The plots of the benchmark can be read: no text lies on another, on a marker or on the edge of its plot."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bench", reason="the benchmark is part of the checkout, not of the wheel")
pytest.importorskip("matplotlib")

from matplotlib.text import Text
from matplotlib.transforms import Bbox

from bench import heads, labels, plots, results

RESULTS = Path(plots.__file__).parent / "results"
HEADS = heads.parse("all,syncfree-lean@1280")


def crowded() -> dict[str, Any]:
    """Four shapes with all heads, most of them close together, some in the same place or far above, and one alone."""
    size = {"dtype": "bfloat16", "data": "unit", "BT": 8192, "H": 4096, "V": 128256, "ignored": 0.0, "variant": ""}
    records: list[dict[str, Any]] = []

    def add(routine: str, head: str, **fields: Any) -> None:
        records.append({"status": "ok", "routine": routine, "head": head, "shape": "llama8b", **size, **fields})

    for k, shape in enumerate(("llama8b", "gemma2b", "qwen06b", "llama2")):
        for i, head in enumerate(HEADS):
            # Steps of the golden ratio spread evenly, and differ from shape to shape.
            a, b = ((7 * k + i) * step % 1.0 for step in (0.618034, 0.754878))
            time = 3.0 + a if i % 5 == 4 else 1.03 + 0.15 * a
            memory = 40000.0 if head == "torch-fp32" else 3000.0 if i % 3 == 0 else 1000.0 * 4**b
            timed = {"x_limit": time, "train_ms": {"median": 40 * time}}
            add("flce", head, shape=shape, peak_mib=memory, **timed)
            if k == 0 and head.startswith(("syncfree", "torch")):
                add("cpu", head, shape=shape, peak_mib=memory, **timed)
    for i, head in enumerate(HEADS):
        for ignored in (0.0, 0.25, 0.5):
            time = 1.0 + i / 50 - ignored * (i % 2)
            add("ragged", head, ignored=ignored, x_limit=time, train_ms={"median": 40 * time})
            if i < 3:
                for shape in ("gemma2b", "llama2"):
                    add("ragged", head, shape=shape, ignored=ignored, x_limit=time + 1, train_ms={"median": time})
        for BT in (1024, 4096, 16384):
            add("scale", head, axis="BT", base="llama8b", BT=BT, train_ms={"median": 1.0}, tflops=BT / 32 - i)
        times = {f"{on}_forward_ms": {"median": 10.0 * i + 0.00515} for on in ("host", "gpu")}
        times |= {f"{on}_backward_ms": {"median": 30.0 if on == "gpu" else 0.01 * i} for on in ("host", "gpu")}
        add("backlog", head, variant="upstream 1", copy_ms=39.0, **times)
    return {"format": results.FORMAT, "environments": {"GPU": {"device": "NVIDIA H200"}}, "records": records}


def boxes(figure: Any, texts: list[Text]) -> list[tuple[str, Bbox]]:
    """Of those that say something; without the line from an annotation to its point."""
    renderer = figure.canvas.get_renderer()
    return [(t.get_text(), Text.get_window_extent(t, renderer)) for t in texts if t.get_visible() and t.get_text()]


def ticks(axis: Any) -> Iterator[Text]:
    """The figures at an axis, without those beyond its ends, which are not drawn."""
    for line in (axis.xaxis, axis.yaxis):
        low, high = sorted(line.get_view_interval())
        for position, text in zip(line.get_ticklocs(), line.get_ticklabels(), strict=True):
            if low <= position <= high:
                yield text


def is_in(box: Bbox, frame: Bbox) -> bool:
    return bool(frame.contains(*box.min) and frame.contains(*box.max))


def faults(figure: Any) -> list[str]:
    """What cannot be read."""
    figure.set_dpi(160)
    figure.canvas.draw()
    found = []
    everything = boxes(figure, list(figure.texts))
    for axis in figure.axes:
        if not axis.get_visible():
            continue
        frame = axis.get_window_extent()
        inside = boxes(figure, list(axis.texts))
        found += [f"{name} leaves the plot" for name, box in inside if not is_in(box, frame)]
        for collection in axis.collections:
            ((x, y),) = axis.transData.transform(collection.get_offsets())
            r = math.sqrt(collection.get_sizes()[0]) / 2 * figure.dpi / 72
            marker = Bbox.from_extents(x - r, y - r, x + r, y + r)
            found += [f"{name} lies on a marker" for name, box in inside if box.overlaps(marker)]
        for line in axis.get_lines():
            if line.get_marker() not in ("", "None"):
                r = line.get_markersize() / 2 * figure.dpi / 72
                for x, y in axis.transData.transform(line.get_xydata()):
                    if not is_in(Bbox.from_extents(x - r, y - r, x + r, y + r), frame):
                        found.append(f"a mark of {line.get_label()} is cut")
            if line.get_transform() == axis.get_xaxis_transform():  # a vertical line through the plot
                x, _ = axis.transData.transform((line.get_xdata()[0], 0))
                found += [f"{name} lies on a line" for name, box in inside if box.x0 < x < box.x1]
        legend = axis.get_legend()
        own = [*ticks(axis), axis.xaxis.label, axis.yaxis.label, axis.title, axis._left_title]
        everything += inside + boxes(figure, own + (legend.get_texts() if legend else []))
    found += [f"{name} leaves the picture" for name, box in everything if not is_in(box, figure.bbox)]
    for (a, first), (b, second) in itertools.combinations(everything, 2):
        if first.overlaps(second):
            found.append(f"{a} lies on {b}")
    return found


@pytest.mark.parametrize("path", [None, *sorted(RESULTS.glob("*.json"))], ids=lambda p: p.stem if p else "crowded")
def test_every_text_can_be_read(path: Path | None) -> None:
    found = {name: faults(figure) for name, figure in plots.draw(crowded() if path is None else results.read(path))}
    assert path or set(found) == set(plots.FIGURES)
    assert found == {name: [] for name in found}


def test_batches_side_by_side_share_a_legend() -> None:
    figures = dict(plots.draw(crowded()))
    axes = figures["ragged"].axes
    (legend,) = [axis.get_legend() for axis in axes if axis.get_legend()]
    names = [text.get_text().split("\n")[0] for text in legend.get_texts()]
    assert sorted(names) == sorted([*HEADS, "three products of"])
    assert [axis.get_title(loc="left").partition(",")[0] for axis in axes] == ["llama8b", "gemma2b", "llama2", ""]


def test_many_names_of_one_point_find_room() -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots()
    style = {"color": "black", "fontsize": 8}
    names = [labels.Label(f"a long name {i}", (0.5, 0.5), 3.0, style) for i in range(24)]
    figure.canvas.draw()
    labels.place(axis, names)
    assert faults(figure) == []
    assert sum(text.arrow_patch is not None for text in axis.texts) >= 16
    plt.close(figure)


def luminance(colour: str) -> float:
    """As in the contrast of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("head", [*heads.NAMES, "unknown"])
def test_colours_stand_out_on_white_and_on_dark_pages(head: str) -> None:
    tone = luminance(plots.line_style(head)["color"])
    assert 1.05 / (tone + 0.05) > 3.5
    assert (tone + 0.05) / (luminance("#0d1117") + 0.05) > 3.5


def test_no_two_heads_look_the_same() -> None:
    looks = [json.dumps(plots.line_style(head) | {"label": ""}) for head in (*heads.NAMES, "syncfree@2048")]
    assert len(set(looks)) == len(looks)
