#!/usr/bin/env python3
"""Fuzzes every op: random calls, right and wrong, held to the reference and to what docs/semantics.md promises.

    tools/fuzz.py --minutes 10                            on the CPU, from a fresh seed
    tools/fuzz.py --device cuda --minutes 10 --seed 7
    tools/fuzz.py --replay 7:1234                         one case again, in the open
    tools/fuzz.py --replay 7:1234 --device cuda

What is drawn and what must hold is in tests/fuzz_cases.py. A case follows from the seed and its number, so that a
finding is replayed by these alone, with the same sources and the same hypothesis. The report names each finding; the
exit status is 1 if there is any. A crash ends the process: the file that --progress names holds the case that was
running. docs/reliability.md says how to run this with the sanitizers of the compiler.
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]
if not any((Path(folder or ".") / "syncfree_ext").is_dir() for folder in sys.path):
    sys.path.append(str(ROOT))

import torch  # noqa: E402
import typer  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402

import syncfree_ext  # noqa: E402
from fuzz_cases import Case, kind_of, kinds, run_case  # type: ignore[import-not-found]  # noqa: E402

# Findings after which more of them would say nothing new.
MOST_FINDINGS = 50
console = Console(stderr=True)


def execute(seed: int, number: int, device: torch.device, only: tuple[str, ...]) -> tuple[str, str, str | None]:
    """Kind and outcome of a case, and for a finding its report."""
    case = Case(seed, number, device)
    kind = kind_of(case, only)
    try:
        outcome: str = run_case(case, kind)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return kind, "finding", "\n".join([*case.notes, traceback.format_exc()])
    return kind, outcome, None


def summary(outcomes: Counter[tuple[str, str]], title: str) -> Table:
    """Cases by kind and outcome."""
    columns = ("exact", "survived", "refused", "discarded", "finding")
    table = Table(title=title)
    table.add_column("kind")
    for column in (*columns, "all"):
        table.add_column(column, justify="right")
    for kind in kinds():
        counts = [outcomes[kind, column] for column in columns]
        table.add_row(kind, *map(str, counts), str(sum(counts)))
    totals = [sum(n for (_, outcome), n in outcomes.items() if outcome == column) for column in columns]
    table.add_section()
    table.add_row("all", *map(str, totals), str(sum(totals)))
    return table


def replay(text: str, device: torch.device, only: tuple[str, ...]) -> None:
    """One case, its notes and its outcome."""
    seed, number = (int(part) for part in text.split(":"))
    case = Case(seed, number, device)
    kind = kind_of(case, only)
    console.print(f"{kind}, case {seed}:{number} on {device}")
    try:
        outcome = run_case(case, kind)
    finally:
        for note in case.notes:
            console.print(note, markup=False)
    console.print(outcome)


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    minutes: Annotated[float, typer.Option(help="how long")] = 1.0,
    cases: Annotated[int, typer.Option(help="most cases; 0: as many as the minutes allow")] = 0,
    seed: Annotated[int, typer.Option(help="of all cases; -1: a fresh one")] = -1,
    first: Annotated[int, typer.Option(help="number of the first case")] = 0,
    only: Annotated[str, typer.Option(help="kinds, separated by commas (default: all)")] = "",
    replay_case: Annotated[str, typer.Option("--replay", help="SEED:CASE, to be run alone")] = "",
    out: Annotated[Path | None, typer.Option(help="file for the numbers and findings, as JSON")] = None,
    progress: Annotated[Path | None, typer.Option(help="file that names the case that is running")] = None,
) -> None:
    """Run cases until the time is up."""
    where = torch.device(device)
    chosen = tuple(name.strip() for name in only.split(",") if name.strip())
    if unknown := set(chosen) - set(kinds()):
        raise typer.BadParameter(f"unknown kinds {sorted(unknown)}; there are {', '.join(kinds())}")
    torch.set_num_threads(min(2, torch.get_num_threads()))
    if replay_case:
        replay(replay_case, where, chosen)
        return
    seed = random.SystemRandom().randrange(2**31) if seed < 0 else seed
    outcomes: Counter[tuple[str, str]] = Counter()
    findings: list[dict[str, Any]] = []
    start = time.monotonic()
    number = first
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=60 * minutes)
        while time.monotonic() - start < 60 * minutes and len(findings) < MOST_FINDINGS:
            if cases and number - first >= cases:
                break
            if progress is not None:
                progress.write_text(f"{seed}:{number}\n")
            kind, outcome, report = execute(seed, number, where, chosen)
            outcomes[kind, outcome] += 1
            if report is not None:
                findings.append({"case": f"{seed}:{number}", "kind": kind, "report": report})
                console.print(f"finding in case {seed}:{number} ({kind})\n{report}", markup=False, highlight=False)
                if "CUDA error" in report:
                    break  # the context is lost, and each case after this one would fail for it
            number += 1
            text = f"seed {seed}, {number - first} cases, {len(findings)} findings"
            bars.update(bar, completed=time.monotonic() - start, description=text)
    seconds = time.monotonic() - start
    console.print(summary(outcomes, f"seed {seed}, cases {first} to {number - 1}, {seconds:.0f} s on {device}"))
    if out is not None:
        name = torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU"
        numbers = {
            "device": name,
            "torch": torch.__version__,
            "library": str(Path(syncfree_ext.__file__).parent),
            "seed": seed,
            "first": first,
            "cases": number - first,
            "seconds": round(seconds),
            "outcomes": {f"{kind}: {outcome}": n for (kind, outcome), n in sorted(outcomes.items())},
            "findings": findings,
        }
        out.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(1 if findings else 0)


if __name__ == "__main__":
    typer.run(main)
