"""The corpus: each reported sync at its line and of its kind, and no row where nothing waits.

On a GPU all cases run as they are. On the CPU those run whose waits a simulated card can show: reads of scalars and of
shapes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import sync_case
from fake_gpu import fake_card

SIMULATED = {"scalar read", "dynamic shape"}
# Masks that are indexed by the op itself; nested reads inside other ops are not simulated.
CPU_CASES = [
    path
    for path in sync_case.PATHS
    if path.name not in sync_case.NEEDS_RANKS and not path.name.startswith(("c29", "c30"))
]


def name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", sync_case.PATHS, ids=name)
def test_marks_are_well_formed(path: Path) -> None:
    """Every case but the free ones and the one about a bug that is no wait has a mark, of a kind that exists."""
    from syncfree_ext.syncs import Kind

    want = sync_case.marks(path)
    assert bool(want.lines) != (path in sync_case.FREE or path.name == "c26_early_read.py")
    assert {kind for _, kind in want.lines} <= {str(kind) for kind in Kind}
    assert path.read_text(encoding="utf-8").count("# FIND") == len(want.lines) + len(want.nodes)


def test_the_documentation_lists_every_case() -> None:
    listed = (sync_case.FOLDER.parent.parent / "docs" / "sync_finder.md").read_text(encoding="utf-8")
    assert [path.stem for path in sync_case.PATHS if f"| `{path.stem}` |" not in listed] == []


@pytest.mark.parametrize("path", CPU_CASES, ids=name)
def test_case_on_a_simulated_card(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with fake_card() as gpu:
        report = sync_case.run(path, gpu=gpu)
    want = sync_case.marks(path)
    got = sync_case.found(report, path)
    assert report.steps == 5
    # Copies between two devices cannot be told where there is one.
    seen = {entry for entry in got.lines if entry[1] != "pageable copy"}
    assert seen == {entry for entry in want.lines if entry[1] in SIMULATED}
    assert got.nodes >= want.nodes


@pytest.mark.cuda
@pytest.mark.alone
@pytest.mark.parametrize("path", [path for path in sync_case.PATHS if path.name not in sync_case.NEEDS_RANKS], ids=name)
def test_case(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNC_CASE_STEPS", "8")
    assert sync_case.differences(path, sync_case.run(path)) == []


@pytest.mark.cuda
@pytest.mark.alone
@pytest.mark.parametrize("path", sync_case.FREE, ids=name)
def test_no_row_in_200_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNC_CASE_STEPS", "205")
    report = sync_case.run(path, steps=200)
    assert report.steps == 200
    assert sync_case.differences(path, report) == []
