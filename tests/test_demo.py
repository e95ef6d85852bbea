"""The demo, with a small vocabulary and few steps: what it prints, what it saves, and that the two curves agree."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import syncfree_ext

ROOT = Path(__file__).parent.parent
STEPS = 8

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="tokenizers is not installed")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the demo that all tests here share."""
    return tmp_path_factory.mktemp("cache")


def run(cache: Path, folder: Path, *arguments: str) -> str:
    """What the demo prints."""
    environment = dict(os.environ, XDG_CACHE_HOME=str(cache))
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(syncfree_ext.__file__).parent.parent), *filter(None, [environment.get("PYTHONPATH")])]
    )
    command = [sys.executable, ROOT / "examples" / "train_lm.py", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(cache: Path, folder: Path, device: torch.device, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Output and numbers of a short training."""
    small = ["--size", "tiny", "--vocabulary", "600", "--text", "0.2", "--steps", str(STEPS), "--device", device.type]
    out = run(cache, folder, *small, "--json", "numbers.json", *arguments)
    return out, json.loads((folder / "numbers.json").read_text(encoding="utf-8"))


def largest_difference(numbers: dict[str, Any]) -> float:
    fused, plain = numbers["fused"]["losses"], numbers["plain"]["losses"]
    assert len(fused) == len(plain) == STEPS
    return max(abs(a - b) for a, b in zip(fused, plain, strict=True))


def test_float32(cache: Path, tmp_path: Path, device: torch.device) -> None:
    out, numbers = train(cache, tmp_path, device, "--dtype", "float32")
    assert largest_difference(numbers) < 1e-3
    assert numbers["fused"]["losses"][-1] < numbers["fused"]["losses"][0]
    assert numbers["fused"]["accuracies"] == pytest.approx(numbers["plain"]["accuracies"], abs=5e-3)
    assert numbers["text"].startswith(numbers["prompt"])
    for row in ("step time, median", "peak memory of the loss head", "host syncs per step", "largest difference"):
        assert row in out
    if importlib.util.find_spec("matplotlib") is None:
        assert "no picture" in out
    else:
        assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    if device.type == "cuda":
        assert numbers["fused"]["syncs_per_step"] == 0
        assert numbers["plain"]["syncs_per_step"] == 2
    else:
        assert "n/a on the CPU" in out


def test_bfloat16_with_ignored_targets(cache: Path, tmp_path: Path, device: torch.device) -> None:
    _, numbers = train(cache, tmp_path, device, "--dtype", "bfloat16", "--ignored", "0.5", "--out", "curves.png")
    assert largest_difference(numbers) < 5e-2
    assert (tmp_path / "curves.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


@pytest.mark.slow
def test_compiled(cache: Path, tmp_path: Path, device: torch.device) -> None:
    _, numbers = train(cache, tmp_path, device, "--dtype", "float32", "--compile")
    assert largest_difference(numbers) < 1e-3


def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The demo as a module of this process."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("train_lm")


def parse(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Reads a command line in this process."""
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *arguments])
    demo(monkeypatch).parse_options()


def test_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(monkeypatch, "--help")
    out = capsys.readouterr().out
    for option in ("--steps", "--size", "--dtype", "--compile", "--ignored", "--seed", "--device", "--out"):
        assert option in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ignored", "1.5"), "expected a number from 0 up to 1, got 1.5"),
        (("--steps", "0"), "expected a whole number of at least 1, got 0"),
        (("--device", "cpu", "--dtype", "float16"), "float16 needs a GPU"),
        (("--device", "meta"), "expected cpu or cuda, got meta"),
    ],
)
def test_wrong_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(monkeypatch, *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpu", "built", "expected"), [(False, True, "cpu"), (True, True, "cuda"), (True, False, "cpu")]
)
def test_default_device(
    gpu: bool, built: bool, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train_lm = demo(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(train_lm, "find_spec", lambda _name: object() if built else None)
    assert train_lm.default_device() == expected
    assert ("without CUDA kernels" in capsys.readouterr().out) == (gpu and not built)
