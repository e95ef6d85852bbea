#!/usr/bin/env python3
"""Soaks the library: threads, streams, memory that runs out, processes, exits with work in flight, leaks.

    tools/soak.py                                 all parts on the CPU, some minutes
    tools/soak.py --device cuda --minutes 5
    tools/soak.py --device cuda --only leaks,exits

| part | what it does |
|---|---|
| threads | eight threads with streams of their own call every op at once; one ring takes the scalars of all |
| models | two models are trained at once, each in its thread and on its stream |
| memory | the memory limit is lowered step by step, so that calls fail at one allocation after another |
| processes | children by fork and by spawn call the library that their parent has in use |
| exits | interpreters end with scalars on their way, streams busy, graphs captured, a thread that goes on |
| leaks | thousands of calls; device, host and pinned memory, files, threads and objects are counted |

Results are compared bit for bit with those of one thread alone. The parts are in tests/soak_parts.py. The last thing
printed is a table; the status is 1 if a part failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]
if not any((Path(folder or ".") / "syncfree_ext").is_dir() for folder in sys.path):
    sys.path.append(str(ROOT))
# cuBLAS promises the same bits on several streams at once only with a workspace for each.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # noqa: E402
import typer  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import soak_parts  # type: ignore[import-not-found]  # noqa: E402

console = Console()
PARTS = ("threads", "models", "memory", "processes", "exits", "leaks")


def run_part(name: str, device: torch.device, minutes: float) -> dict[str, Any]:
    """The numbers of a part, which takes about a sixth of the minutes."""
    share = 10 * minutes
    on_gpu = device.type == "cuda"
    numbers: dict[str, Any] = {
        "threads": lambda: soak_parts.threads(device, share),
        "models": lambda: soak_parts.two_models(device, int(share * (100 if on_gpu else 8))),
        "memory": lambda: soak_parts.out_of_memory(device),
        "processes": lambda: soak_parts.processes(device, max(1, int(share / 2))),
        "exits": lambda: soak_parts.exits(device, max(1, int(share / 60))),
        "leaks": lambda: soak_parts.leaks(device, int(share * (60 if on_gpu else 30))),
    }[name]()
    return numbers


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    minutes: Annotated[float, typer.Option(help="about how long")] = 3.0,
    only: Annotated[str, typer.Option(help="parts, separated by commas (default: all)")] = "",
    out: Annotated[Path | None, typer.Option(help="file for the numbers, as JSON")] = None,
) -> None:
    """Run the parts one after the other."""
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    chosen = [name.strip() for name in only.split(",") if name.strip()] or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        raise typer.BadParameter(f"unknown parts {sorted(unknown)}; there are {', '.join(PARTS)}")
    table = Table("part", "seconds", "result", "numbers", title=f"soak on {device}, torch {torch.__version__}")
    results: dict[str, Any] = {}
    for name in chosen:
        start = time.monotonic()
        console.print(f"{name} ...")
        try:
            numbers = run_part(name, where, minutes)
            verdict = "skipped" if "skipped" in numbers else "ok"
        except Exception:
            numbers, verdict = {"error": traceback.format_exc()}, "FAILED"
            console.print(numbers["error"], markup=False, highlight=False)
        seconds = round(time.monotonic() - start, 1)
        results[name] = {"result": verdict, "seconds": seconds, **numbers}
        shown = ", ".join(f"{key} {value}" for key, value in numbers.items() if key != "error")
        table.add_row(name, f"{seconds:.1f}", verdict, shown)
    console.print(table)
    if out is not None:
        name = torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU"
        record = {"device": name, "torch": torch.__version__, "minutes": minutes, "parts": results}
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(1 if any(result["result"] == "FAILED" for result in results.values()) else 0)


if __name__ == "__main__":
    typer.run(main)
