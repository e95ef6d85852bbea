"""tools/lean_sums.py: that it emulates what it says."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("bench", reason="the benchmark is part of the checkout, not of the wheel")
pytest.importorskip("typer", reason="typer is not installed")
pytest.importorskip("rich", reason="rich is not installed")

from bench import data, shapes


@pytest.fixture
def lean_sums(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "tools"))
    return importlib.import_module("lean_sums")


def test_exact_is_the_gradient(lean_sums: ModuleType) -> None:
    """In float32 but for the sum: far closer than bfloat16 comes."""
    drawn = data.make(shapes.Shape("lean", 200, 16, 50), "confident", torch.bfloat16, "cpu", seed=3)
    w = drawn.w.double().requires_grad_()
    F.cross_entropy(drawn.x.double() @ w.T, drawn.t).backward()
    assert w.grad is not None
    batch = lean_sums.Batch(200, 16, 50, "confident", 3)
    assert float((batch.exact - w.grad).norm() / w.grad.norm()) < 1e-5


def test_unit_data_keep_the_error_of_one_rounding_only_in_the_end(lean_sums: ModuleType) -> None:
    """Rounding once costs 1.66e-3; each chunk's rounding of the targets' rows adds as much, in squares."""
    batch = lean_sums.Batch(512, 64, 2000, "unit", 1)
    for chunks in (1, 8):
        last, each, largest = batch.errors(chunks)
        assert last == pytest.approx(1.66e-3, rel=0.03)
        assert each == pytest.approx(1.66e-3, rel=0.03) if chunks == 1 else each > 1.8e-3
        assert largest < 0.05


def test_the_table(lean_sums: ModuleType) -> None:
    from typer.testing import CliRunner

    app = lean_sums.typer.Typer()
    app.command()(lean_sums.main)
    size = ["--rows", "64", "--hidden", "8", "--classes", "30"]
    shown = CliRunner().invoke(app, ["--data", "trained_mean", "--chunks", "1,4", "--seeds", "2", *size])
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("e-0") == 8
    assert CliRunner().invoke(app, ["--data", "none"]).exit_code == 2
