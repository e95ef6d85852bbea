"""Reports: JSON, ranking, merging ranks, the table, the allow file, the profiler's trace."""

from __future__ import annotations

import copy
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from syncfree_ext.syncs import Kind, Report, Row, allow, merge, sites, truth
from syncfree_ext.syncs.kinds import ADVICE
from syncs_samples import random_report


@pytest.fixture
def draw(rng: torch.Generator) -> random.Random:
    return random.Random(int(torch.randint(2**31, (), generator=rng)))


def test_json_returns_what_went_in(draw: random.Random, tmp_path: Path) -> None:
    report = random_report(draw)
    text = report.to_json(tmp_path / "r.json")
    assert Report.from_json(text) == report
    assert Report.from_json((tmp_path / "r.json").read_text(encoding="utf-8")) == report
    assert Report.from_json(Report().to_json()) == Report()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "other"}', '{"format": "syncfree.syncs/1"}', '{"format": "syncfree.syncs/1", "x": 1}'],
)
def test_json_that_is_no_report(text: str) -> None:
    with pytest.raises(ValueError, match="not a report of find_syncs"):
        Report.from_json(text)


def test_json_with_a_kind_that_does_not_exist(draw: random.Random) -> None:
    data = json.loads(random_report(draw).to_json())
    data["rows"][0]["kind"] = "unknown"
    with pytest.raises(ValueError, match="not a report"):
        Report.from_json(json.dumps(data))


def test_rows_are_ranked_by_idle_and_timelines_follow(draw: random.Random) -> None:
    report = random_report(draw)
    named = [[report.rows[index].where for *_, index in timeline.waits] for timeline in report.timelines]
    draw.shuffle(report.rows)
    order = {row.where: index for index, row in enumerate(report.rows)}
    for timeline, names in zip(report.timelines, named, strict=True):
        timeline.waits = [(a, b, order[name]) for (a, b, _), name in zip(timeline.waits, names, strict=True)]
    report.rank_rows()
    idle = [row.idle_ms for row in report.rows]
    assert idle == sorted(idle, reverse=True)
    assert named == [[report.rows[index].where for *_, index in timeline.waits] for timeline in report.timelines]


def test_merging_takes_means_and_the_slowest_step(draw: random.Random) -> None:
    a = random_report(draw)
    b = copy.deepcopy(a)
    for row in b.rows:
        row.ranks, row.blocked_ms, row.calls = [1], row.blocked_ms * 3, row.calls + 1
    b.step_ms *= 2
    only_b = copy.deepcopy(b.rows[0])
    only_b.line += 1000
    b.rows.append(only_b)
    merged = merge([a, b])
    assert (merged.ranks, merged.step_ms) == (2, b.step_ms)
    rows = {row.key: row for row in merged.rows}
    for row in a.rows:
        assert rows[row.key].blocked_ms == pytest.approx(2 * row.blocked_ms)
        assert rows[row.key].calls == pytest.approx(row.calls + 0.5)
        assert rows[row.key].ranks == [0, 1]
    assert rows[only_b.key].calls == pytest.approx(only_b.calls / 2)
    assert rows[only_b.key].ranks == [1]
    for before, after in zip(a.timelines, merged.timelines, strict=True):
        assert [a.rows[i].key for *_, i in before.waits] == [merged.rows[i].key for *_, i in after.waits]


def test_merging_nothing_and_one(draw: random.Random) -> None:
    report = random_report(draw)
    assert merge([report]) is report
    with pytest.raises(ValueError, match="at least one"):
        merge([])


def test_every_kind_has_advice() -> None:
    assert set(ADVICE) == set(Kind)


def test_table(draw: random.Random) -> None:
    pytest.importorskip("rich")
    from syncfree_ext.syncs import table

    report = random_report(draw)
    text = report.table(top=5, width=200)
    rows = report.rows
    assert all(f"{row.idle_ms:.3f}" in text and row.where in text and row.kind in text for row in rows[:5])
    assert rows[5].where not in text
    narrow = report.table(top=5, width=80)
    assert all(f"{row.idle_ms:.3f}" in narrow and row.kind in narrow for row in rows[:5])
    assert max(map(len, narrow.splitlines())) <= 80
    assert "… and 2 more lines" in text
    assert all(text.count(row.advice[:30]) == 1 for row in rows[:5])
    assert "cudaFree in a.py(1): f" in text
    assert f"{report.blocked_ms:.2f} of {report.step_ms:.2f} ms" in table.headline(report)
    report.probe_ms = 20.0
    assert f"{rows[0].idle_ms:.3f}" not in report.table(width=200)
    assert "never waited" in table.headline(Report(steps=3, step_ms=1.0))
    assert "<svg" in table.svg(report)


@pytest.mark.parametrize(("error", "said"), [(-4e-4, "+0.0 %"), (-6e-4, "-0.1 %"), (0.0123, "+1.2 %")])
def test_how_far_the_model_is_off(draw: random.Random, error: float, said: str) -> None:
    report = random_report(draw)
    report.probe_ms, report.model_error = 0.0, error
    assert f"The model behind these figures is {said} off" in " ".join(report.table().split())


def test_table_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ImportError, match=r"needs rich: pip install \"syncfree_ext\[syncs\]\""):
        Report().table()


# The allow file.


def row(
    file: str = "a/train.py", line: int = 3, function: str = "Trainer.log", kind: str = "scalar read", **more: Any
) -> Row:
    return Row(file, line, function, "", kind, "op", **{"calls": 2.0, **more})


def entries(tmp_path: Path, text: str) -> list[allow.Allowed]:
    path = tmp_path / "allow.txt"
    path.write_text(text, encoding="utf-8")
    return allow.read(path)


@pytest.mark.parametrize(
    ("text", "covered"),
    [
        ("train.py  # why", True),
        ("a/train.py:3  # why", True),
        ("train.py:4  # why", False),
        ("rain.py  # why", False),
        ("*  # why", True),
        ("train.py::log  # why", True),
        ("train.py::Trainer.log # why", True),
        ("train.py::other  # why", False),
        ("train.py kind=scalar read # why", True),
        ("train.py:3 kind=dynamic shape # why", False),
        ("lib/*  # why", True),
        ("lib/trainer.py:12  # why", True),
        ("lib/trainer.py:13  # why", False),
    ],
)
def test_entries(tmp_path: Path, text: str, covered: bool) -> None:
    (entry,) = entries(tmp_path, "# a comment\n\n" + text + "\n")
    assert entry.covers(row(via="lib/trainer.py:12")) is covered


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("train.py", "expected a reason"),
        ("train.py  #  ", "expected a reason"),
        ("train.py:x  # why", "expected FILE"),
        ("train.py kind=magic  # why", "expected kind to be one of"),
        ("train.py max=-1  # why", "expected FILE"),
        ("a b  # why", "expected FILE"),
    ],
)
def test_entries_that_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"allow\.txt:2: {problem}"):
        entries(tmp_path, "# first\n" + text + "\n")


def test_calls_over_the_maximum_count(tmp_path: Path) -> None:
    report = Report(rows=[row(), row(line=9), row(file="b.py", calls=5.0)], steps=1)
    checked = allow.check(report, entries(tmp_path, "train.py max=3 # why\nother.py # gone\n"))
    assert checked.calls == pytest.approx(1.0 + 5.0)
    assert [r.where for r in checked.rows] == ["a/train.py:9", "b.py:3"]
    assert [entry.text for entry in checked.unused] == ["other.py"]


# The profiler's trace.


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}


TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name"},
        event("python_function", "train.py(10): main", 0, 1000),
        event("python_function", "train.py(20): log", 90, 200),
        event("python_function", "torch/_tensor.py(5): item", 95, 150),
        event("cuda_runtime", "cudaStreamSynchronize", 100, 100),
        event("cuda_runtime", "cudaMemcpyAsync", 97, 2),
        event("cuda_runtime", "cudaMemcpyAsync", 400, 80),
        event("cuda_runtime", "cudaMalloc", 500, 60),
        event("cuda_runtime", "cudaLaunchKernel", 600, 90),
        event("cuda_runtime", "cudaEventSynchronize", 700, 10, tid=2),
        event("cuda_runtime", "cudaDeviceSynchronize", 2000, 500),
        event("kernel", "gemm", 0, 195),
        event("kernel", "short", 20, 10),
        event("kernel", "gemm", 260, 300),
        event("gpu_memcpy", "copy", 600, 10),
    ]
}


def test_trace() -> None:
    calls = truth.parse(TRACE, ignore_after=1500)
    assert [(c.name, c.start, c.function) for c in calls] == [
        ("cudaStreamSynchronize", 100, "train.py(20): log"),
        ("cudaMemcpyAsync", 400, "train.py(10): main"),
        ("cudaMalloc", 500, "train.py(10): main"),
        ("cudaEventSynchronize", 700, None),
    ]
    assert [c.idle for c in calls] == [60, 40, 40, 0]  # after 200 nothing ran until 260; after 480, and 560, until 600
    assert "cudaDeviceSynchronize" in [c.name for c in truth.parse(TRACE)]


def test_files_of_the_trace() -> None:
    """torch's and the finder's are known by where they lie, whether or not the profiler cut their folders."""
    torch_file, own_file = torch.__file__, sites.__file__
    for file, mine in {
        "train.py": True,
        "torch/nn/modules/module.py": False,
        torch_file: False,
        own_file: False,
        "syncfree_ext/syncs/timer.py": False,
        "/home/me/torch/train.py": True,
        "/home/me/site-packages/project/train.py": True,
        "<frozen runpy>": False,
        "contextlib.py": False,
        "my_contextlib.py": True,
    }.items():
        main, inner = event("python_function", "main.py(1): main", 0, 90), f"{file}(2): f"
        trace = [main, event("python_function", inner, 1, 80), event("cuda_runtime", "cudaStreamSynchronize", 2, 70)]
        (call,) = truth.parse({"traceEvents": trace})
        assert call.function == (inner if mine else "main.py(1): main"), file


def test_summary_names_functions_without_a_row() -> None:
    report = Report(rows=[row(file="x/train.py", function="log")], steps=1)
    found = truth.summarise(truth.parse(TRACE, 1500), 2, report)
    assert found.calls["cudaStreamSynchronize"] == 0.5
    assert found.blocked_ms["cudaMalloc"] == pytest.approx(0.03)
    assert [(name, where) for name, where, *_ in found.unmatched] == [
        ("cudaMemcpyAsync", "train.py(10): main"),
        ("cudaMalloc", "train.py(10): main"),
    ]


def test_a_librarys_line_accounts_for_its_file() -> None:
    report = Report(rows=[row(file="x/run.py", function="go", via="lib/train.py:7")], steps=1)
    assert truth.summarise(truth.parse(TRACE, 1500), 2, report).unmatched == []


@pytest.mark.parametrize("trace", [{}, [], {"traceEvents": 3}])
def test_no_trace(trace: Any) -> None:
    with pytest.raises(ValueError, match="Chrome trace"):
        truth.parse(trace)


def test_trace_of_this_torch(tmp_path: Path) -> None:
    """The profiler of the torch at hand writes what the parser reads: complete events, functions with lines."""
    profiler = truth.Profiler()
    profiler.start()
    torch.ones(2).sum().item()
    assert profiler.stop() == []
