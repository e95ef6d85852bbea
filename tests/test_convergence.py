"""examples/convergence.py: its runs, and that its verdict can be either."""

from __future__ import annotations

import importlib
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
STEPS = 200

pytest.importorskip("tokenizers")


@pytest.fixture
def convergence(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module of this process."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("convergence")


def curve(seed: int, head: int, offset: float = 0.0, noise: float = 0.01) -> list[float]:
    """A falling loss: seeds differ by 0.05, two runs from one seed by less."""
    of_seed, of_run = random.Random(seed), random.Random(f"{seed} {head}")
    shift = of_seed.gauss(0, 0.05)
    return [8 * math.exp(-i / 80) + shift + offset + of_run.gauss(0, noise) for i in range(STEPS)]


def record(head: str, seed: int, **changed: Any) -> dict[str, Any]:
    losses = changed.pop("losses", None) or curve(seed, head == "ours")
    return {
        "head": head,
        "seed": seed,
        "ignored": 0.0,
        "losses": losses,
        "held_out": losses[-1],
        "device": "CPU",
        "torch": "2",
        "dtype": "float32",
        "size": {"width": 8},
        "parameters": 3,
        **changed,
    }


def merged(convergence: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, records: list[dict[str, Any]]) -> bool:
    folder.mkdir(exist_ok=True)
    for r in records:
        (folder / f"{r['head']}-{r['seed']}-{r['ignored']:g}.json").write_text(json.dumps(r))
    arguments = ["convergence.py", "merge", "--parts", str(folder), "--name", str(folder / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    same: bool = convergence.merge(convergence.parse_options())
    return same


def test_a_verdict(convergence: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record(head, seed) for head in ("ours", "eager") for seed in range(3)]
    assert merged(convergence, tmp_path / "same", monkeypatch, records)
    result = json.loads((tmp_path / "same" / "out.json").read_text())
    found = result["shares"][0]["verdict"]
    assert found["same"]
    assert 0 < found["between_heads"] < 0.01 < found["between_seeds"] < 0.2
    assert len(result["shares"][0]["curves"]["ours"]["0"]) == STEPS // result["point"]


@pytest.mark.parametrize("offset", [0.3, -0.3, math.nan])
def test_a_curve_that_is_off(offset: float, convergence: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record("eager", seed) for seed in range(3)]
    records += [record("ours", seed, losses=curve(seed, 1, offset)) for seed in range(3)]
    if math.isnan(offset):
        records[-1]["losses"][50] = math.nan
    assert not merged(convergence, tmp_path, monkeypatch, records)


def test_held_out_text_that_is_off(convergence: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record("eager", seed) for seed in range(3)]
    records += [record("ours", seed, held_out=9.0) for seed in range(3)]
    assert not merged(convergence, tmp_path, monkeypatch, records)


@pytest.mark.parametrize("key", ["device", "dtype", "size", "torch"])
def test_runs_of_different_settings_are_not_compared(
    key: str, convergence: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="runs of different sizes"):
        merged(convergence, tmp_path, monkeypatch, [record("ours", 0), record("eager", 0, **{key: "another"})])


def test_runs_that_lack_a_partner_are_not_compared(
    convergence: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="not the same seeds"):
        merged(convergence, tmp_path, monkeypatch, [record("ours", 0), record("eager", 1)])


def test_the_program(
    convergence: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, at a size at which nothing is learnt: on the CPU in float32 both heads give the same curves."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(convergence, "WINDOWS", 16)
    monkeypatch.setitem(convergence.SIZES, "tiny", convergence.Size(1, 32, 2, 32, 4, 1024, 0.5, 25, 4e-3))
    common = ["--size", "tiny", "--device", "cpu", "--dtype", "float32", "--parts", str(tmp_path)]
    for part in ("ours:0:0.6", "eager:0:0.6", "ours:1:0.6", "eager:1:0.6"):
        monkeypatch.setattr(sys, "argv", ["convergence.py", "run", "--only", part, *common])
        convergence.main()
    monkeypatch.setattr(sys, "argv", ["convergence.py", "merge", *common, "--name", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="0"):
        convergence.main()
    result = json.loads((tmp_path / "out.json").read_text())
    found = result["shares"][0]["verdict"]
    assert found["between_heads"] < 1e-3 < found["between_seeds"]
    if importlib.util.find_spec("matplotlib") is not None:
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
        first = (tmp_path / "out.svg").read_bytes()
        with pytest.raises(SystemExit, match="0"):
            convergence.main()
        assert (tmp_path / "out.svg").read_bytes() == first, "the same numbers, the same picture"


def test_wrong_parts(convergence: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("theirs:0:0", "ours:0"):
        monkeypatch.setattr(sys, "argv", ["convergence.py", "run", "--only", part])
        with pytest.raises(SystemExit, match="2"):
            convergence.parse_options()
