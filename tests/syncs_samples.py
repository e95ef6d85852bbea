"""Reports with made-up figures, for tests of what is made from reports. Nothing in them was measured."""

from __future__ import annotations

import random

from syncfree_ext.syncs import Kind, Report, Row
from syncfree_ext.syncs.report import Slow, Timeline, Truth

NASTY = '</script><script>alert("x")</script> & <b>'


def random_report(draw: random.Random, rows: int = 7, steps: int = 3) -> Report:
    """A report with all kinds, odd names and every optional part."""
    kinds = [str(kind) for kind in Kind]
    report = Report(
        steps=steps,
        step_ms=draw.uniform(5, 50),
        device=f"made-up device {NASTY}",
        torch="0.0",
        notes=[f"made up {NASTY}"],
        truth=Truth(
            2,
            {"cudaStreamSynchronize": 3.5},
            {"cudaStreamSynchronize": 1.25},
            0.5,
            [("cudaFree", "a.py(1): f", 1.0, 0.2)],
        ),
        slow=[Slow("a.py:1", "aten::mm", 1.0, 0.3)],
    )
    report.replay_ms, report.free_ms, report.busy_ms = report.step_ms * 1.01, report.step_ms * 0.7, report.step_ms * 0.6
    for index in range(rows):
        backward, line = draw.random() < 0.3, draw.randrange(2, 500)
        report.rows.append(
            Row(
                file=f"dir/train {index}.py",
                line=line,
                function="Model.forward",
                source=f"x = y[mask].item()  # {NASTY}",
                kind=kinds[index % len(kinds)],
                op="aten::index",
                detail=draw.choice(["", "index by a mask"]),
                via=draw.choice([None, "lib/trainer.py:12"]),
                inner=draw.choice([None, "torch/amp/grad_scaler.py:400"]),
                node="IndexBackward0" if backward else None,
                backward="train.py:9" if backward else None,
                calls=draw.choice([1.0, 2.0, 0.2]),
                blocked_ms=draw.random(),
                waited_ms=draw.random() / 2,
                max_ms=draw.random() * 2,
                idle_ms=draw.random() * 3,
                saves_ms=draw.random(),
                ranks=[0],
                excerpt=[(line - 1, "import torch"), (line, f"y = {NASTY}")],
            )
        )
    for _ in range(steps):
        waits = [(at := draw.uniform(0, 4), at + draw.random(), draw.randrange(rows)) for _ in range(9)] if rows else []
        report.timelines.append(Timeline(5.0, sorted(waits), [(0.0, 1.0), (1.5, 4.0)]))
    report.rank_rows()
    return report
