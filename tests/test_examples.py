"""The examples of the loop's parts, run briefly: each fails where it differs from its naive version."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"

Run: TypeAlias = "Callable[..., str]"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example's main in this process, and returns what it prints; or, if it is to fail, what it says then."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", torch.backends.cudnn.deterministic)

    def call(name: str, *arguments: str, code: int | None = None) -> str:
        module = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        if code is None:
            module.main()
            return capsys.readouterr().out
        with pytest.raises(SystemExit, match=str(code)):
            module.main()
        return "".join(capsys.readouterr())

    return call


def test_anchor_sampling(run: Run, device: torch.device) -> None:
    out = run("anchor_sampling", "--steps", "30", "--log-interval", "6", "--device", device.type)
    assert "the two runs are equal up to the order of their sums" in out
    if device.type == "cuda":
        assert ", 0.00 after" in out
    else:
        assert "syncs per step between two logs: not applicable before, not applicable after" in out


def test_offload_vae(run: Run, device: torch.device) -> None:
    out = run("offload_vae", "--steps", "20", "--device", device.type)
    assert "all 20 losses and the weights are equal in each bit" in out
    if device.type == "cuda":
        assert ", 0.00 after" in out
    else:
        assert "syncs per step: not applicable before, not applicable after" in out


def test_sync_free_loop(run: Run, device: torch.device, tmp_path: Path) -> None:
    file, tiny = tmp_path / "numbers.json", ("--size", "tiny", "--device", device.type)
    out = run("sync_free_loop", "--steps", "6", *tiny, "--json", str(file))
    stages = json.loads(file.read_text(encoding="utf-8"))["stages"]
    assert [stage["step"] for stage in stages] == list(range(8))
    assert all(stage["milliseconds"] > 0 for stage in stages)
    if device.type == "cuda":
        assert stages[0]["syncs_per_step"] > stages[-1]["syncs_per_step"] == 0
    assert "every stage computes the same losses" in out
    assert run("sync_free_loop", "--step", "3", "--steps", "4", *tiny).count(" ms") == 1


@pytest.mark.cuda
def test_time_loop_parts(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    out = run("time_loop_parts", "--rows", "3", "--length", "5000", "--json", str(file))
    assert "AsyncScalars.put, 3 values" in out
    assert set(json.loads(file.read_text(encoding="utf-8"))) == {"device", "torch", "put", "selection"}


def test_a_difference_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    anchors = importlib.import_module("anchor_sampling")
    monkeypatch.setattr(anchors.sf, "masked_indices", lambda mask, size, **_options: anchors_at_the_front(mask, size))
    with pytest.raises(SystemExit, match="the two runs differ by more than"):
        anchors_main(monkeypatch, anchors)


def anchors_at_the_front(mask: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    indices = torch.arange(size).expand(mask.shape[0], size)
    return indices, mask.gather(1, indices), mask.sum(-1)


def anchors_main(monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    monkeypatch.setattr(sys, "argv", ["anchor_sampling.py", "--steps", "12", "--log-interval", "6", "--device", "cpu"])
    module.main()  # type: ignore[attr-defined]


def test_wrong_options(run: Run) -> None:
    assert "expected at least twice --log-interval" in run("anchor_sampling", "--steps", "3", code=2)
    assert "expected more than 3, got 2" in run("offload_vae", "--steps", "2", code=2)
    assert "invalid choice" in run("sync_free_loop", "--step", "9", code=2)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("anchor_sampling", "--log-interval"),
        ("offload_vae", "--steps"),
        ("sync_free_loop", "--rounds"),
        ("time_loop_parts", "--length"),
    ],
)
def test_help(run: Run, name: str, option: str) -> None:
    assert option in run(name, "--help", code=0)
