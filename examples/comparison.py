"""The demo's two runs side by side: the numbers, a table, and the picture of both loss curves."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Run:
    """What one training run gave."""

    name: str
    losses: list[float]
    accuracies: list[float]
    step_seconds: float  # median
    syncs_per_step: float | None  # None where there is no GPU to wait for
    head_bytes: int


def mean_of_last(values: list[float], count: int = 10) -> float:
    """The mean over the last steps."""
    return statistics.fmean(values[-count:])


def table(fused: Run, plain: Run) -> str:
    """Both runs side by side, as plain text."""

    def syncs(run: Run) -> str:
        return "n/a on the CPU" if run.syncs_per_step is None else f"{run.syncs_per_step:.2f}"

    forms: list[tuple[str, Callable[[Run], str]]] = [
        ("", lambda run: run.name),
        ("loss, mean of the last 10 steps", lambda run: f"{mean_of_last(run.losses):.4f}"),
        ("accuracy, mean of the last 10 steps", lambda run: f"{mean_of_last(run.accuracies):.2%}"),
        ("step time, median", lambda run: f"{run.step_seconds * 1e3:.1f} ms"),
        ("peak memory of the loss head", lambda run: f"{run.head_bytes / 2**20:.1f} MiB"),
        ("host syncs per step", syncs),
    ]
    rows = [(label, form(fused), form(plain)) for label, form in forms]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
    lines.insert(1, "-" * len(lines[0]))
    differences = [abs(a - b) for a, b in zip(fused.losses, plain.losses, strict=True)]
    step = max(range(len(differences)), key=differences.__getitem__)
    lines.append(
        f"largest difference between the loss curves: {differences[step]:.2e}, in step {step + 1}, "
        f"where the loss is {plain.losses[step]:.3f}"
    )
    return "\n".join(lines)


def draw(fused: Run, plain: Run, path: Path) -> bool:
    """Saves both loss curves and their difference; False where matplotlib is missing.

    The background is transparent and every line is of a middle tone, so that the picture reads on light and dark pages.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    grey = "#858585"
    plain_colour, fused_colour, gap_colour = "#e08a00", "#2f81f7", "#b25fd1"
    colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with pyplot.rc_context({**dict.fromkeys(colours, grey), "font.size": 11}):
        figure, (curves, gaps) = pyplot.subplots(
            2, 1, figsize=(8, 5.4), sharex=True, height_ratios=(3, 1), layout="constrained"
        )
        steps = range(1, len(plain.losses) + 1)
        curves.plot(steps, plain.losses, color=plain_colour, linewidth=5, alpha=0.55, label=plain.name)
        curves.plot(steps, fused.losses, color=fused_colour, linewidth=1.6, label=fused.name)
        curves.set_ylabel("training loss")
        curves.legend(frameon=False)
        gaps.plot(steps, [abs(a - b) for a, b in zip(fused.losses, plain.losses, strict=True)], color=gap_colour)
        gaps.set_ylim(bottom=0)
        gaps.set_ylabel("|difference|")
        gaps.set_xlabel("step")
        for axes in (curves, gaps):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color=grey, alpha=0.25)
            axes.patch.set_alpha(0)
        figure.savefig(path, dpi=140, transparent=True)
        pyplot.close(figure)
    return True
