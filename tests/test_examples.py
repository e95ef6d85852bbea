"""The examples of the loop's parts, run briefly: each fails where it differs from its naive version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import syncfree_ext

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str, folder: Path | None = None, fails: bool = False) -> str:
    """What the example prints."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(syncfree_ext.__file__).parent.parent), *filter(None, [environment.get("PYTHONPATH")])]
    )
    command = [sys.executable, EXAMPLES / f"{name}.py", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr if fails else done.stdout


def test_anchor_sampling(device: torch.device) -> None:
    out = run("anchor_sampling", "--steps", "30", "--log-interval", "6", "--device", device.type)
    assert "the two runs are equal up to the order of their sums" in out
    if device.type == "cuda":
        assert ", 0.00 after" in out
    else:
        assert "syncs per step between two logs: not applicable before, not applicable after" in out


def test_offload_vae(device: torch.device) -> None:
    out = run("offload_vae", "--steps", "20", "--device", device.type)
    assert "all 20 losses and the weights are equal in each bit" in out
    if device.type == "cuda":
        assert ", 0.00 after" in out
    else:
        assert "syncs per step: not applicable before, not applicable after" in out


def test_sync_free_loop(device: torch.device, tmp_path: Path) -> None:
    out = run(
        "sync_free_loop", "--steps", "6", "--size", "tiny", "--device", device.type, "--json", "f.json", folder=tmp_path
    )
    numbers = json.loads((tmp_path / "f.json").read_text(encoding="utf-8"))
    stages = numbers["stages"]
    assert [stage["step"] for stage in stages] == list(range(8))
    assert all(stage["milliseconds"] > 0 for stage in stages)
    if device.type == "cuda":
        assert stages[0]["syncs_per_step"] > stages[-1]["syncs_per_step"] == 0
    assert "every stage computes the same losses" in out
    one = run("sync_free_loop", "--step", "3", "--steps", "4", "--size", "tiny", "--device", device.type)
    assert one.count(" ms") == 1


def test_wrong_options() -> None:
    assert "expected at least twice --log-interval" in run("anchor_sampling", "--steps", "3", fails=True)
    assert "expected more than 3, got 2" in run("offload_vae", "--steps", "2", fails=True)
    assert "invalid choice" in run("sync_free_loop", "--step", "9", fails=True)


@pytest.mark.parametrize("name", ["anchor_sampling", "offload_vae", "sync_free_loop"])
def test_help(name: str) -> None:
    assert "--steps" in run(name, "--help")
