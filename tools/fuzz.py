#!/usr/bin/env python3
"""Fuzzes every op: random calls, right and wrong, held to the reference and to what docs/semantics.md promises.

    tools/fuzz.py --minutes 10                            on the CPU, from a fresh seed
    tools/fuzz.py --device cuda --minutes 10 --seed 7
    tools/fuzz.py --replay 7:1234                         one case again, in the open
    tools/fuzz.py --replay 7:1234 --device cuda

What is drawn and what must hold is in tests/fuzz_cases.py. A case follows from the seed and its number, so that a
finding is replayed by these alone, with the same sources and the same hypothesis. The report names each finding; the
exit status is 1 if there is any. The cases run in a process of their own, so that a crash, or an abort by a sanitizer,
is a finding like any other, and the next case goes on. `make fuzz` runs this on the CPU library with the sanitizers of
the compiler.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
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

from fuzz_cases import Case, kind_of, kinds, run_case  # type: ignore[import-not-found]  # noqa: E402

# Findings after which more of them would say nothing new.
MOST_FINDINGS = 50
console = Console(stderr=True)


def execute(seed: int, number: int, device: torch.device, only: tuple[str, ...]) -> tuple[str, str, str | None]:
    """Kind and outcome of a case, and for a finding its report."""
    case = Case(seed, number, device, aloud=True)
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


def run_cases(
    device: torch.device, seconds: float, most: int, seed: int, first: int, only: tuple[str, ...], record: Path
) -> None:
    """Run cases until the time is up, or one is lost with the process; `record` gets a line for each."""
    start = time.monotonic()
    findings = 0
    parent = os.getppid()  # without it nobody reads on
    with record.open("a", encoding="utf-8", buffering=1) as lines:
        number = first
        while time.monotonic() - start < seconds and number - first < most and findings < MOST_FINDINGS:
            if os.getppid() != parent:
                return
            lines.write(json.dumps({"start": number}) + "\n")
            # Standard error is a file here, which is to hold what this case says, and no other.
            sys.stderr.flush()
            os.ftruncate(2, 0)
            os.lseek(2, 0, os.SEEK_SET)
            kind, outcome, report = execute(seed, number, device, only)
            lines.write(json.dumps({"case": number, "kind": kind, "outcome": outcome, "report": report}) + "\n")
            findings += report is not None
            if report is not None and "CUDA error" in report:
                # The context is lost, and every case after this one would fail for it.
                os._exit(3)
            number += 1


class Watch:
    """Reads what the process with the cases has done so far."""

    def __init__(self, seed: int, device: str, record: Path) -> None:
        self.seed, self.device, self.record = seed, device, record
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.findings: list[dict[str, str]] = []
        self.number = -1  # of the case that runs, or ran last
        self.ended = True
        self._read = 0

    def look(self) -> None:
        """Take in the new lines, of which the last may be half written."""
        with self.record.open(encoding="utf-8") as lines:
            lines.seek(self._read)
            for line in iter(lines.readline, ""):
                if not line.endswith("\n"):
                    break
                self._read = lines.tell()
                self._take(json.loads(line))

    def _take(self, entry: dict[str, Any]) -> None:
        self.ended = "start" not in entry
        self.number = entry["case" if self.ended else "start"]
        if self.ended:
            self.outcomes[entry["kind"], entry["outcome"]] += 1
            if entry["report"] is not None:
                self.add(entry["kind"], entry["report"])

    def add(self, kind: str, report: str) -> None:
        """One finding more, shown at once."""
        name = f"{self.seed}:{self.number}"
        self.findings.append({"case": name, "kind": kind, "report": report})
        console.print(f"finding in case {name} ({kind})\n{report}", markup=False, highlight=False, soft_wrap=True)

    def lost(self, status: int, errors: str, only: tuple[str, ...]) -> None:
        """The process has ended in the middle of a case."""
        self.ended = True
        kind = kind_of(Case(self.seed, self.number, torch.device("cpu")), only)
        self.outcomes[kind, "finding"] += 1
        self.add(kind, f"the process ended with status {status}\n{errors}")


def told(path: Path, size: int = 5000) -> str:
    """What a case has said: all of it, or its notes, the first error of a sanitizer, and the end."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if len(text) <= size:
        return text
    at = max(0, *(text.find(mark) for mark in ("ERROR: AddressSanitizer", "runtime error")))
    return "\n[...]\n".join((text[: size // 4], text[at : at + size // 2], text[-size // 4 :]))


def supervise(watch: Watch, minutes: float, most: int, first: int, only: tuple[str, ...]) -> None:
    """Start processes that run cases, one after the other, until the time is up."""
    start = time.monotonic()
    errors = watch.record.with_suffix(".err")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=60 * minutes)
        while len(watch.findings) < MOST_FINDINGS:
            done = watch.number + 1 if watch.number >= 0 else first
            left = 60 * minutes - (time.monotonic() - start)
            if left <= 0 or done - first >= most:
                return
            command = [sys.executable, __file__, "--device", watch.device, "--seed", str(watch.seed)]
            command += ["--first", str(done), "--cases", str(most - done + first), "--minutes", str(left / 60)]
            command += ["--only", ",".join(only), "--record", str(watch.record)]
            with errors.open("w") as sink, subprocess.Popen(command, stdout=sink, stderr=sink) as process:
                while process.poll() is None:
                    time.sleep(0.2)
                    watch.look()
                    text = f"seed {watch.seed}, case {watch.number}, {len(watch.findings)} findings"
                    bars.update(bar, completed=time.monotonic() - start, description=text)
            watch.look()
            if not watch.ended:
                watch.lost(process.returncode, told(errors), only)
            elif process.returncode not in (0, 3):
                raise SystemExit(f"the process with the cases ended with status {process.returncode}\n{told(errors)}")


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    minutes: Annotated[float, typer.Option(help="how long")] = 1.0,
    cases: Annotated[int, typer.Option(help="most cases")] = 10**9,
    seed: Annotated[int, typer.Option(help="of all cases; -1: a fresh one")] = -1,
    first: Annotated[int, typer.Option(help="number of the first case")] = 0,
    only: Annotated[str, typer.Option(help="kinds, separated by commas (default: all)")] = "",
    replay_case: Annotated[str, typer.Option("--replay", help="SEED:CASE, to be run alone, in this process")] = "",
    out: Annotated[Path | None, typer.Option(help="file for the numbers and the findings, as JSON")] = None,
    record: Annotated[Path | None, typer.Option(hidden=True)] = None,
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
    if record is not None:
        run_cases(where, 60 * minutes, cases, seed, first, chosen, record)
        return
    seed = random.SystemRandom().randrange(2**31) if seed < 0 else seed
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(seed, device, Path(folder) / "record")
        watch.record.touch()
        supervise(watch, minutes, cases, first, chosen)
    seconds = time.monotonic() - start
    done = sum(watch.outcomes.values())
    console.print(summary(watch.outcomes, f"seed {seed}, {done} cases from {first} on, {seconds:.0f} s on {device}"))
    if out is not None:
        numbers = {
            "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "sanitizers": os.environ.get("ASAN_OPTIONS") is not None,
            "seed": seed,
            "first": first,
            "cases": done,
            "seconds": round(seconds),
            "outcomes": {f"{kind}: {outcome}": n for (kind, outcome), n in sorted(watch.outcomes.items())},
            "findings": watch.findings,
        }
        out.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(1 if watch.findings else 0)


if __name__ == "__main__":
    typer.run(main)
