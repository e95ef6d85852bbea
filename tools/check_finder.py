#!/usr/bin/env python3
"""Checks the sync finder on a GPU: what it finds, what it costs, and whether its ranking is right.

    python tools/check_finder.py all --json finder.json --svg docs/sync_finder.svg
    python tools/check_finder.py cases --only 'c0*,f01_train'
    python tools/check_finder.py ranking --only large --seconds 90

| part | what it does | fails if |
|---|---|---|
| cases | runs tests/sync_cases, and those that never wait for 200 steps | most runs miss a mark, or a row has no mark |
| overhead | times a step without and with the detector and the timer | a step that the GPU bounds is over the bars |
| ranking | removes each wait of a loop in two sizes, and leaves each alone | costs have another order than predicted |
| trainers | runs Trainer and SFTTrainer with the stock loss and with ours | a row names us, or the losses differ |

What is timed runs in rounds, until the time is up, and only times of the same round are compared: a host whose speed
drifts slows down both sides. Medians over the rounds are trusted to two of their standard deviations; what that leaves
open is "noisy", and more seconds may tell. How the speed of the machine changed meanwhile is noted and decides nothing.
The status is 1 if a part failed, and 4 if none did but one was noisy, or if there is no GPU.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import io
import json
import math
import os
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / name) for name in ("tools", "examples", "tests")]
if not any((Path(folder or ".") / "syncfree_ext").is_dir() for folder in sys.path):
    sys.path.append(str(ROOT))

import finder_loops as loops  # noqa: E402
import finder_rounds as rounds  # noqa: E402
import torch  # noqa: E402
import typer  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import sync_case  # type: ignore[import-not-found]  # noqa: E402
import syncfree_ext  # noqa: E402
from syncfree_ext.syncs import Row, SyncWarning, collect, no_sync, runner, sites, table  # noqa: E402

EXAMPLE = ROOT / "examples" / "sync_free_loop.py"
BARS = {"detector": 0.02, "timer": 0.10}  # of a step that the GPU bounds
STEPS = {"gpu_bound": 12, "host_bound": 16}  # timed at once
QUIET = 0.05  # a larger change of the same work is noted
LENIENT = 3  # from so many runs of a case on, a mark may be missed in half of them
ALIKE = 0.02  # costs that differ by less than this part of the step have no order
# Of the first step's loss, relative: the stock one may have bfloat16 logits, of 8 bits. A wrong loss is far off.
LOSS = 1e-2
NO_CONCLUSION = 4  # the status of a check that knows nothing
COUNTED = ("runs", "found", "missed", "false_rows")
console = Console(width=None if sys.stdout.isatty() else 140)


@dataclass
class Check:
    """What a part found: rows of its table, and facts about each item. `noise` says why nothing is concluded."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    noise: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        """In one word."""
        if self.failures:
            return "FAILED"
        return "noisy" if self.noise else "skipped" if self.skipped and not self.facts else "ok"


def host_ms() -> float:
    """Milliseconds that the host takes for a fixed piece of Python and of small CPU ops."""
    begin, x = time.perf_counter(), torch.ones(32, 32)
    sum(number * number for number in range(50_000))
    for _ in range(300):
        x = (x @ x).clamp(max=1.0)
    return (time.perf_counter() - begin) * 1e3


def speeds(step: Callable[[], float]) -> dict[str, list[float]]:
    """Milliseconds of the host's work and of the plain step, some times each."""
    return {"the host's own work": [host_ms() for _ in range(21)], "the plain step": [step() for _ in range(5)]}


def unquiet(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> list[str]:
    """In which ways the machine was not quiet; empty if it was."""
    reasons = []
    for what in before:
        change = statistics.median(after[what]) / statistics.median(before[what]) - 1
        if abs(change) > QUIET:
            reasons.append(f"{what} took {change:+.0%} at the end")
        for when, times in (("start", before[what]), ("end", after[what])):
            low, middle, high = statistics.quantiles(times, n=4)  # the middle half: one repeat may always be held up
            if high - low > QUIET * middle:
                reasons.append(f"{what} varied by {(high - low) / middle:.0%} at the {when}")
    return reasons


def check_case(name: str, seconds: float, machine: loops.Machine, check: Check) -> None:
    """A case with 5 steps, and with 200 if it never waits; and again while there is time.

    On a shared machine the host may be so late that there is nothing to wait for. A wait is missed if it is so in more
    than half of the runs, or in any of less than three. What is found and has no mark is wrong in any.
    """
    path = sync_case.FOLDER / f"{name}.py"
    counts = [5, 200] if path in sync_case.FREE else [5]
    rows: list[dict[str, Any]] = [{"case": name, "steps": n, **dict.fromkeys(COUNTED, 0)} for n in counts]
    check.rows += rows
    want, missing, unmarked = sync_case.marks(path), Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    begin = time.perf_counter()
    while rows[0]["runs"] == 0 or (time.perf_counter() - begin) * (1 + 1 / rows[0]["runs"]) <= seconds:
        for steps, row in zip(counts, rows, strict=True):
            with contextlib.redirect_stdout(io.StringIO()), patch.dict(os.environ, SYNC_CASE_STEPS=str(steps + 3)):
                report = sync_case.run(path, steps=steps, gpu=machine.gpu)
            got = sync_case.found(report, path)
            nodes = {(line, f"backward of {node}") for line, node in want.nodes - got.nodes}
            missed, false = (want.lines - got.lines) | nodes, got.lines - want.lines
            found = len(want.lines & got.lines) + len(want.nodes & got.nodes)
            for column, count in zip(COUNTED, (1, found, len(missed), len(false)), strict=True):
                row[column] += count
                check.facts.setdefault("all", dict.fromkeys(COUNTED, 0))[column] += count
            missing.update(missed)
            unmarked.update(false)
            if missed or false:
                check.facts.setdefault(name, {})["seen"] = sync_case.differences(path, report)
            text = f"{name}: {report.steps} of {steps} steps were measured"
            if report.steps != steps and text not in check.failures:
                check.failures.append(text)
    runs = sum(row["runs"] for row in rows)
    for (line, what), times in sorted(missing.items()):
        text = f"{name}:{line} {what} was not found in {times} of {runs} runs"
        if 2 * times > runs or runs < LENIENT:
            check.failures.append(text)
        else:
            check.facts[name].setdefault("missed_at_times", []).append(text)
    check.failures += [
        f"{name}:{line} {what} has no mark, in {times} of {runs} runs"
        for (line, what), times in sorted(unmarked.items())
    ]


def ways(step: loops.Step, count: int, machine: loops.Machine) -> dict[str, Callable[[], float]]:
    """The ways to run a step. Each returns the mean of some, in ms."""

    def detector() -> float:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=SyncWarning)  # not torch's own, which the detector needs
            with no_sync("warn"):
                return step.mean_ms(count)

    def timer() -> float:
        # A step more than is timed, since the finder waits for the GPU after the last.
        with machine.find(3, count + 1):
            ms = step.mean_ms(count, warm=3)
            step()
        return ms

    return {"plain": lambda: step.mean_ms(count), "detector": detector, "timer": timer}


def check_overhead(name: str, seconds: float, machine: loops.Machine, check: Check) -> None:
    """How much longer a step takes with each tool; each round gives a ratio to its own plain step.

    A tool fails if the median is above its bar by more than two deviations, and passes if two more would not lift it
    above. By chance one that costs just the bar does either in about one check of 20 with five rounds, of 40 with many.
    """
    runs = ways(loops.make_step(machine, name), STEPS[name], machine)
    for run in runs.values():
        run()  # pays what is paid once
    before = speeds(runs["plain"])
    times = rounds.in_rounds(runs, seconds, least=5)
    changes = unquiet(before, speeds(runs["plain"]))
    check.facts[name] = {"plain_ms": statistics.median(times["plain"]), "machine": changes}
    for tool, bar in BARS.items():
        longer = [100 * (a / b - 1) for a, b in zip(times[tool], times["plain"], strict=True)]
        middle = rounds.Median.of(longer)
        row = {"step": name, "tool": tool, "rounds": len(longer), "longer_percent": middle.value}
        row |= {"deviation_percent": middle.deviation, "least_percent": min(longer), "most_percent": max(longer)}
        check.rows.append({**row, "bar_percent": 100 * bar if name == "gpu_bound" else None})
        text = f"{name}: {tool} makes a step {middle} % longer, {bar:.0%} are allowed"
        if name == "gpu_bound" and middle.value - rounds.SURE * middle.deviation > 100 * bar:
            check.failures.append(text)
        elif name == "gpu_bound" and middle.value + rounds.SURE * middle.deviation > 100 * bar:
            check.noise.append(f"{text}: {len(longer)} rounds cannot tell")


def predict(loop: loops.Loop, machine: loops.Machine) -> dict[str, Any]:
    """What the finder says about each wait, in ms. All lines of a wait are one row: they go together."""
    row_of = collect.row_of

    def grouped(call: Any) -> Row:
        row = row_of(call)
        for name, texts in loop.waits.items():
            if any(text in row.source for text in texts):
                row.file, row.line, row.op, row.detail = name, 0, "", ""
                row.via = row.node = row.backward = None
        return row

    with patch.object(collect, "row_of", grouped), machine.find(3, 5) as report:
        loop.step_ms(())
    rows = {name: [row for row in report.rows if row.file == name] for name in loop.waits}
    return {
        "error": 100 * report.model_error,
        "step": report.replay_ms,
        "all": report.replay_ms - report.free_ms,
        "calls": {name: sum(row.calls for row in found) for name, found in rows.items()},
        "saves": {name: sum(row.saves_ms for row in found) for name, found in rows.items()},
        "idle": {name: max((row.idle_ms for row in found), default=0.0) for name, found in rows.items()},
        "elsewhere": [f"{row.where} {row.kind}" for row in report.rows if row.file not in loop.waits],
    }


def check_ranking(name: str, seconds: float, machine: loops.Machine, check: Check) -> None:
    """A loop's costs, predicted and measured: what each wait's removal saves, and the idle it leaves if alone.

    What is measured includes the work that takes a wait's place. Each round predicts too, so that both sides meet the
    same machine, and pairs of waits are compared by what differs within the rounds.

    "right order": of the pairs that can be told apart, at least three, most are predicted to be in their order, and
    none the other way round. It says nothing about the sizes of the costs, nor about costs that are alike. "wrong
    order": a pair is measured one way and predicted the other way, both beyond what chance does to any of the loop's
    pairs in one check of twenty: of 42 pairs at two deviations each, some would be out of order although they cost
    the same. Anything between is noisy.
    """
    loop = loops.LOOPS[name](machine)
    waits = tuple(loop.waits)
    without = {"base": (), "none": waits} | {f"-{wait}": (wait,) for wait in waits}
    without |= {f"+{wait}": tuple(other for other in waits if other != wait) for wait in waits}
    runs: dict[str, Callable[[], Any]] = {key: partial(loop.step_ms, gone) for key, gone in without.items()}
    runs["predict"] = partial(predict, loop, machine)
    for run in runs.values():
        run()  # pays what is paid once
    before = speeds(runs["base"])
    times = rounds.in_rounds(runs, seconds)
    changes = unquiet(before, speeds(runs["base"]))
    found, base, count = times["predict"], statistics.median(times["base"]), len(times["base"])
    facts: dict[str, Any] = {
        "base_ms": base,
        "rounds": count,
        "replay_ms": statistics.median(one["step"] for one in found),
        "replay_error_percent": statistics.median(one["error"] for one in found),
        "largest_replay_error_percent": max((one["error"] for one in found), key=abs),
        "all_saves_predicted_ms": statistics.median(one["all"] for one in found),
        "all_saves_measured_ms": rounds.Median.of_differences(times["base"], times["none"]).value,
        "other_waits": found[-1]["elsewhere"],
        "machine": changes,
    }
    rows = [{"loop": name, "wait": wait, "calls": found[-1]["calls"][wait]} for wait in waits]
    limit = rounds.beyond_chance(2 * math.comb(len(waits), 2), count)
    for cost, longer, shorter in (("saves", "base", "-{}"), ("idle", "+{}", "none")):
        predicted = {wait: [one[cost][wait] for one in found] for wait in waits}
        measured = {}
        for wait, row in zip(waits, rows, strict=True):
            pairs = zip(times[longer.format(wait)], times[shorter.format(wait)], strict=True)
            measured[wait] = [a - b for a, b in pairs]
            middle = rounds.Median.of(measured[wait])
            row |= {f"{cost}_predicted_ms": statistics.median(predicted[wait]), f"{cost}_measured_ms": middle.value}
            row[f"{cost}_noise_ms"] = middle.deviation
        facts[cost] = rounds.agreement(predicted, measured, ALIKE * base, limit)
    noise = rounds.doubts([facts["saves"], facts["idle"]])
    wrong = [] if noise else [f"{cost}: {text}" for cost in ("saves", "idle") for text in facts[cost]["certain"]]
    facts["conclusion"] = f"none: {'; '.join(noise)}" if noise else "wrong order" if wrong else "right order"
    check.rows += rows
    check.facts[name] = facts
    check.noise += [f"{name}: {reason}, in {count} rounds" for reason in noise]
    check.failures += [f"{name}, {text}" for text in wrong]


def draw(path: Path, machine: loops.Machine) -> None:
    """The report of the example as the command line makes it: its picture, and its JSON beside it."""
    arguments = ["--step", "0", "--rounds", "1"]
    # Its own first five steps end with a wait.
    report = runner.run(str(EXAMPLE), arguments, warmup=6, steps=5, gpu=machine.gpu).report
    report.device = machine.name
    for row in report.rows:
        row.file = f"examples/{Path(row.file).name}"  # wherever it was run
    title = f"syncfree syncs --warmup 6 examples/{EXAMPLE.name} {' '.join(arguments)}"
    path.write_text(table.svg(report, title=title), encoding="utf-8")
    report.to_json(path.with_suffix(".json"))


def names_us(row: Row) -> bool:
    """Whether a place of a row is in this package, the finder apart."""
    package = sites.short_path(str(Path(syncfree_ext.__file__).parent)) + os.sep
    places = [place for place in (row.file, row.via, row.inner, row.backward) if place is not None]
    return any(place.startswith(package) and not place.startswith(f"{package}syncs{os.sep}") for place in places)


def check_trainer(name: str, seconds: float, machine: loops.Machine, check: Check) -> None:
    """A trainer with the stock loss, then with ours; none if no seconds are left."""
    if (reason := loops.missing(name.startswith("sft"))) or seconds < 0:
        check.skipped.append(f"{name}: {reason or 'the time is up'}")
        return
    losses, facts = {}, check.facts.setdefault(name, {})
    for loss in ("stock", "ours"):
        report, losses[loss], peak = loops.train_with(machine, name, loss == "ours")
        facts |= {f"{loss}_waits": report.calls, f"{loss}_step_ms": report.step_ms, f"{loss}_peak_mib": peak}
        if name.endswith("compiled") and not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
            check.failures.append(f"{name}, {loss}: nothing was compiled")
        for row in report.rows:
            us = loss == "ours" and names_us(row)
            entry = {"trainer": name, "loss": loss, "line": row.via or row.where, "kind": row.kind}
            check.rows.append({**entry, "op": row.op, "calls": row.calls, "names_us": us})
            if us:
                check.failures.append(f"{name}: a row names this package: {row.where} {row.kind}")
    differences = [abs(a - b) / abs(a) for a, b in zip(losses["stock"], losses["ours"], strict=True)]
    facts |= {"first_loss_difference": differences[0], "largest_loss_difference": max(differences)}
    if not differences[0] <= LOSS or not all(map(math.isfinite, losses["ours"])):
        check.failures.append(f"{name}: the losses differ by {differences[0]:.1e} in the first step")


PARTS = {"cases": check_case, "overhead": check_overhead, "ranking": check_ranking, "trainers": check_trainer}
ITEMS = {
    "cases": [path.stem for path in sync_case.PATHS if path.name not in sync_case.NEEDS_RANKS],
    "overhead": ["gpu_bound", "host_bound"],
    "ranking": list(loops.LOOPS),
    "trainers": ["trainer", "sft", "trainer_compiled", "sft_compiled"],  # compiling changes TF32 for good: it is last
}


def chosen(part: str, only: str) -> dict[str, list[str]]:
    """The items of each part that are asked for; a part without any is left out."""
    if part not in (*PARTS, "all"):
        raise typer.BadParameter(f"unknown part {part!r}; there are {', '.join(PARTS)}, all", param_hint="PART")
    parts = list(PARTS) if part == "all" else [part]
    words = [word.strip() for word in only.split(",") if word.strip()] or ["*"]
    every = [item for name in parts for item in ITEMS[name]]
    if unknown := [word for word in words if not fnmatch.filter(every, word)]:
        raise typer.BadParameter(f"nothing is named {unknown}; there are {', '.join(every)}", param_hint="--only")
    found = {name: [i for i in ITEMS[name] if any(fnmatch.fnmatch(i, word) for word in words)] for name in parts}
    return {name: items for name, items in found.items() if items}


def cell(value: Any) -> str:
    """A value as a person reads it."""
    if isinstance(value, bool) or value is None:
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) >= 1e-3 or abs(value) < 1e-9 else f"{value:.1e}"
    if isinstance(value, dict):
        return ", ".join(
            f"{name.replace('_', ' ')} {cell(inner)}" for name, inner in value.items() if inner not in (None, [])
        )
    return ", ".join(map(cell, value)) if isinstance(value, list) else str(value)


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table, whose columns are the keys."""
    shown = Table(*(key.replace("_", " ") for key in (rows[0] if rows else ())), title=title)
    for row in rows:
        shown.add_row(*map(cell, row.values()))
    console.print(shown)


def find_machine() -> loops.Machine | None:
    """The GPU, if there is one."""
    return loops.Machine() if torch.cuda.is_available() else None


def main(
    part: Annotated[str, typer.Argument(help="cases, overhead, ranking, trainers, or all")],
    seconds: Annotated[float, typer.Option(help="about how long each part repeats what it measures")] = 60.0,
    only: Annotated[str, typer.Option(help="names or patterns, separated by commas (default: all)")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="file for the numbers, as JSON")] = None,
    svg: Annotated[Path | None, typer.Option(help="picture of the example's report, beside its JSON")] = None,
) -> None:
    """Run one part, or all of them, in this process."""
    parts = chosen(part, only)
    if svg is not None and "large" not in parts.get("ranking", ()):
        raise typer.BadParameter("the picture is drawn with the loop large, which is not asked for", param_hint="--svg")
    machine, results = find_machine(), {}
    if machine is None:
        console.print("There is no CUDA device, so nothing is known.")
        raise typer.Exit(NO_CONCLUSION)
    for name, items in parts.items():
        console.print(f"{name} ...")
        begin, check = time.monotonic(), Check()
        for index, item in enumerate(items):
            left = seconds - (time.monotonic() - begin)
            try:
                if svg is not None and item == "large":
                    draw(svg, machine)
                PARTS[name](item, left / (len(items) - index), machine, check)
            except Exception as error:
                console.print(traceback.format_exc(), markup=False, highlight=False)
                check.failures.append(f"{item}: {type(error).__name__}: {error}")
            gc.collect()  # its models
        show(f"{name} on {machine.name}", check.rows)
        for item, facts in check.facts.items():
            for fact, value in facts.items():
                console.print(f"{item}, {fact.replace('_', ' ')}: {cell(value)}", markup=False)
        results[name] = {"result": check.result, "seconds": round(time.monotonic() - begin, 1), **asdict(check)}
        if json_file is not None:  # after each part, should the next one not end
            record = {"device": machine.name, "torch": torch.__version__, "parts": results}
            json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    why = {name: "\n".join(r["failures"] + r["noise"] + r["skipped"]) for name, r in results.items()}
    last = [{"part": n, "seconds": r["seconds"], "result": r["result"], "why": why[n]} for n, r in results.items()]
    show("", last)
    words = {result["result"] for result in results.values()}
    raise typer.Exit(1 if "FAILED" in words else NO_CONCLUSION if "noisy" in words else 0)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched
    typer.run(main)
