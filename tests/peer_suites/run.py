"""Runs the tests of other projects on this library, and prints how many pass.

    python tests/peer_suites/run.py liger PATH    Liger-Kernel's, from a checkout of it; on CUDA (needs triton)
    python tests/peer_suites/run.py torch         PyTorch's samples of linear_cross_entropy (torch >= 2.13); on the CPU

docs/peer_suites.md explains what is counted, and each deviation. What is not of this project stays in its checkout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# Relative to the checkout.
SUITES = (
    "test/transformers/test_fused_linear_cross_entropy.py",
    "test/cutedsl/test_fused_linear_cross_entropy.py",
    "test/transformers/test_cutile_fused_linear_cross_entropy_sm90.py",
    "test/transformers/test_cutedsl_fused_linear_cross_entropy_sm90.py",
    "test/transformers/test_cross_entropy.py",
)

app = typer.Typer(add_completion=False, no_args_is_help=True)
console = Console(width=140)


def liger_command(checkout: Path, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The pytest command line that runs Liger's tests with this library in the place of its losses, and its PATHs."""
    paths = [checkout / "src", checkout, ROOT, ROOT / "tests", HERE]
    before = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []  # where this library may come from
    env = {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *before]),
        "SYNCFREE_SEED": os.environ.get("SYNCFREE_SEED", "0"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "liger_plugin", "-p", "no:cacheprovider"]
    # Liger's options of pytest may need plugins that are not here.
    command += ["-c", os.devnull, "--rootdir", str(checkout), "--tb=line", *arguments]
    return command, env


@app.command()
def liger(
    checkout: Annotated[Path, typer.Argument(help="a checkout of Liger-Kernel", exists=True, file_okay=False)],
    only: Annotated[str, typer.Option(help="-k of pytest")] = "",
    out: Annotated[Path | None, typer.Option(help="keep what came of each test, as JSON")] = None,
) -> None:
    """Liger-Kernel's tests of its fused linear cross-entropy and of its cross-entropy."""
    checkout = checkout.resolve()
    files = [name for name in SUITES if (checkout / name).is_file()]
    with tempfile.TemporaryDirectory() as folder:
        path = out.resolve() if out else Path(folder) / "results.json"
        path.unlink(missing_ok=True)
        command, env = liger_command(checkout, [*files, *(["-k", only] if only else [])])
        env["SYNCFREE_PEER_RESULTS"] = str(path)
        code = subprocess.run(command, cwd=checkout, env=os.environ | env, check=False).returncode
        if not path.exists():
            console.print(f"pytest ended with {code} and wrote no results")
            raise typer.Exit(1)
        results = json.loads(path.read_text())
    raise typer.Exit(_report(results))


def _report(results: list[dict[str, str]]) -> int:
    table = Table("file", "tests", "passed", "deviate", "failed", "skipped", "calls held to float64", "wrong")
    bad = 0
    for file in sorted({result["file"] for result in results}):
        rows = [result for result in results if result["file"] == file]
        counts = Counter(
            "deviate" if row["outcome"] == "failed" and row["deviation"] else row["outcome"] for row in rows
        )
        wrong = [row for row in rows if row["float64"].startswith("WRONG")]
        checked = sum(int(row["float64"].split()[0]) for row in rows if row["float64"].endswith("calls"))
        values = (
            len(rows),
            counts["passed"],
            counts["deviate"],
            counts["failed"],
            counts["skipped"],
            checked,
            len(wrong),
        )
        table.add_row(file, *map(str, values))
        bad += counts["failed"] + len(wrong)
    console.print(table)
    for row in results:
        if row["outcome"] == "failed":
            console.print(
                f"{'deviates' if row['deviation'] else 'FAILED'}: {row['name']}: {row['deviation'] or row['why']}"
            )
        if row["float64"].startswith("WRONG"):
            console.print(f"{row['float64']}: {row['name']}")
        if row["deviation"] and row["outcome"] == "passed":
            console.print(f"passes although it is listed as a deviation: {row['name']}")
    return 1 if bad else 0


@app.command("torch")
def torch_suite() -> None:
    """PyTorch's own samples of linear_cross_entropy, in float64, float32, bfloat16 and float16."""
    os.environ.setdefault("SYNCFREE_SEED", "0")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(HERE)]
    import torch_samples

    if not torch_samples.available():
        console.print("the samples need torch >= 2.13 and expecttest")
        raise typer.Exit(1)
    table = Table("samples", "total", "passed", "refused")
    for name, tally in torch_samples.run().items():
        why = "\n".join(f"{count} × {reason}" for reason, count in tally.refused.items())
        table.add_row(name, str(tally.total), str(tally.passed), why)
    console.print(table)


if __name__ == "__main__":
    app()
