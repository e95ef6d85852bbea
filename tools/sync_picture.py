#!/usr/bin/env python3
"""Draws docs/sync_finder.svg: the sync finder's table for examples/waiting_loop.py, on a simulated GPU.

The card is that of the tests (tests/fake_gpu.py), so the figures are made up and the picture says so. The lines, kinds
and the ranking are what the finder makes of them. With `--html FILE` the page is written as well. For real figures:

    syncfree syncs --json report.json examples/waiting_loop.py && syncfree show --svg docs/sync_finder.svg report.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fake_gpu import fake_card  # type: ignore[import-not-found]  # noqa: E402
from syncfree_ext.syncs import runner, table  # noqa: E402

# Seconds on the GPU, for the ops that are long there.
WORK = {"aten::mm": 250e-6, "aten::addmm": 250e-6, "aten::_fused_adamw_": 400e-6}
SHORT = 4e-6  # the others


def main() -> None:
    """Command line: the picture is written to docs/, the page where asked."""
    parser = argparse.ArgumentParser(description="Draws docs/sync_finder.svg from a simulated run.")
    parser.add_argument("--html", type=Path, help="write the page, too")
    options = parser.parse_args()
    with fake_card(WORK, default=SHORT) as gpu:
        outcome = runner.run(str(ROOT / "examples" / "waiting_loop.py"), [], warmup=2, steps=3, gpu=gpu)
    report = outcome.report
    report.device = "simulated GPU"
    for row in report.rows:
        row.file = f"examples/{Path(row.file).name}"
    report.notes.append("The GPU is simulated: the figures show what a report looks like, nothing more.")
    path = ROOT / "docs" / "sync_finder.svg"
    path.write_text(
        table.svg(report, title="syncfree syncs examples/waiting_loop.py (simulated GPU)"), encoding="utf-8"
    )
    print(f"{path.relative_to(ROOT)}: {len(report.rows)} lines")
    if options.html is not None:
        report.to_html(options.html)


if __name__ == "__main__":
    main()
