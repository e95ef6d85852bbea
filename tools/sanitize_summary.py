#!/usr/bin/env python3
"""The table of tools/sanitize.sh, from the logs of compute-sanitizer that it made.

Where the probe of tools/sanitize.sh shows that initcheck does not see bulk tensor stores, its reports of kernels that
read what products have stored are counted apart.

A report begins with a line that says what happened, and goes on in indented lines that name the kernel. Those that name
a kernel of the namespace syncfree are ours. A total that is larger than the reports found counts as ours: what is not
understood is not passed over.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

_PREFIX = "========= "
# Lines that are no report, or end one.
_NO_REPORT = re.compile(r"COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|LEAK SUMMARY|Target application|Use --|$")
_TOTAL = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:errors?|hazards? displayed)")
_WITH_PRODUCTS = ("edges", "options", "plain", "properties", "fuzz")
# Kernels that read what matrix products have stored: ours by bulk tensor stores, and cuBLAS' too.
_READ_PRODUCTS = re.compile(r"\b(?:fused_targets|bias_slices|scale|row_loss|add_targets|cast_rows)_kernel\b")
# What pytest prints of its progress, and does not end the line.
_PROGRESS = re.compile(r"^[.sxXFE]+(?==========)")
_NOT_PRINTED = re.compile(r"(\d+) (?:errors|hazards) were not printed")


@dataclass
class Part:
    """What a part of the run found."""

    name: str
    status: int
    seconds: int
    ours: int = 0
    other: int = 0
    unknown: int = 0
    stored: int = 0
    first: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """One word for the table."""
        if self.ours or self.unknown:
            return "FOUND"
        if self.status in (124, 137):
            return "TIMEOUT"
        return "FAILED" if self.status else "ok"


def reports(text: str) -> list[str]:
    """The reports of a log, each as one string."""
    found: list[str] = []
    inside = False
    for line in text.splitlines():
        line = _PROGRESS.sub("", line)
        if not line.startswith(_PREFIX.rstrip()):
            continue
        rest = line[len(_PREFIX) :] if line.startswith(_PREFIX) else ""
        if rest.startswith("    ") and inside:
            found[-1] += "\n" + rest.strip()
        elif _NO_REPORT.match(rest):
            inside = False
        else:
            inside = True
            found.append(rest.strip())
    return found


def sees_no_stores(probe: str) -> bool:
    """Whether the log of the probe reports a read of what a bulk tensor store has written."""
    reported = any("Uninitialized" in report and "read_box_kernel" in report for report in reports(probe))
    return reported and "all checks passed" in probe and _TOTAL.search(probe) is not None


def judge(name: str, status: int, seconds: int, text: str, no_stores: bool = False) -> Part:
    """Count the reports of a log; no_stores: the tool does not see bulk tensor stores."""
    part = Part(name, status, seconds)
    for report in reports(text):
        if _NOT_PRINTED.search(report):
            continue
        if no_stores and "Uninitialized" in report and "syncfree" in report and _READ_PRODUCTS.search(report):
            part.stored += 1
        elif "syncfree" in report:
            part.ours += 1
            if len(part.first) < 5 and report not in part.first:
                part.first.append(report)
        else:
            part.other += 1
    total = sum(int(n) for n in _TOTAL.findall(text))
    part.unknown = max(0, total - part.ours - part.other - part.stored)
    if not _TOTAL.search(text) and status not in (124, 137):
        part.status = status or 1  # the tool itself did not run
    return part


def main(folder: str, names: list[str]) -> int:
    """Print the table and write summary.json; the status of the run."""
    parts = []
    probe = Path(folder) / "stores.log"
    blind = probe.exists() and sees_no_stores(probe.read_text(encoding="utf-8", errors="replace"))
    for name in names:
        status, seconds = (int(n) for n in (Path(folder) / f"{name}.status").read_text().split())
        text = (Path(folder) / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        tool, suite = name.partition(".")[0].split("-")
        parts.append(judge(name, status, seconds, text, blind and tool == "initcheck" and suite in _WITH_PRODUCTS))
    for part in parts:
        for report in part.first:
            print(f"{part.name}: {report}")
        if part.verdict == "FAILED":
            text = (Path(folder) / f"{part.name}.log").read_text(encoding="utf-8", errors="replace")
            print(f"{part.name} failed:\n{text[-1500:]}")
    if blind:
        print(
            "initcheck does not see bulk tensor stores: what it says of kernels that read them is in the column stored"
        )
    print(f"{'part':<24} {'seconds':>7} {'ours':>6} {'stored':>6} {'other':>6} {'unknown':>7} {'status':>6}  verdict")
    for part in parts:
        counts = f"{part.ours:>6} {part.stored:>6} {part.other:>6} {part.unknown:>7} {part.status:>6}"
        print(f"{part.name:<24} {part.seconds:>7} {counts}  {part.verdict}")
    record = [{**asdict(part), "verdict": part.verdict} for part in parts]
    (Path(folder) / "summary.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(any(part.verdict != "ok" for part in parts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
