"""tools/check_finder.py on the simulated card: that each part runs, and that what is wrong is reported as such."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fake_gpu import fake_card

pytest.importorskip("typer", reason="typer is not installed")
pytest.importorskip("rich", reason="rich is not installed")

TOOLS = Path(__file__).resolve().parent.parent / "tools"
Run: TypeAlias = "Callable[..., tuple[int, str, dict[str, Any]]]"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool as a module, with a host whose speed does not change."""
    monkeypatch.setattr(sys, "path", [str(TOOLS), *sys.path])
    module = importlib.import_module("check_finder")
    monkeypatch.setattr(module, "host_ms", lambda: 1.0)
    monkeypatch.setattr(module, "STEPS", {"gpu_bound": 2, "host_bound": 3})
    return module


@pytest.fixture
def machine(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A GPU that is simulated on the CPU; time is its own, so that figures are the same in each run."""

    class Simulated(check.loops.Machine):  # type: ignore[misc,name-defined]
        device = torch.device("cpu")
        name = "simulated GPU"

        def mark(self) -> float:
            return gpu.record()

        def between(self, first: float, last: float) -> float:
            return (last - first) * 1e3

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are tiny
    work = dict.fromkeys(("aten::mm", "aten::addmm", "aten::_fused_adamw_"), 250e-6)
    with fake_card(work, default=4e-6) as gpu:
        simulated = Simulated()
        simulated.gpu = gpu
        monkeypatch.setattr(check, "find_machine", lambda: simulated)
        yield simulated
    torch.set_num_threads(threads)


@pytest.fixture
def run(check: ModuleType, tmp_path: Path) -> Run:
    """Runs the tool: its status, what it prints, and the parts of its JSON."""
    from typer.testing import CliRunner

    app = check.typer.Typer()
    app.command()(check.main)

    def call(*arguments: str) -> tuple[int, str, dict[str, Any]]:
        file = tmp_path / "numbers.json"
        result = CliRunner().invoke(app, ["--seconds", "0", "--json", str(file), *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        numbers = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"parts": {}}
        return result.exit_code, result.output, numbers["parts"]

    return call


# ---------------------------------------------------------------------------------------------------------------- cases


def test_cases(run: Run, machine: Any) -> None:
    status, out, parts = run("cases", "--only", "c1[023]*")
    assert status == 0, out
    rows = {(row["case"], row["steps"]): row for row in parts["cases"]["rows"]}
    assert rows["c10_progress_bar", 5] == {
        "case": "c10_progress_bar", "steps": 5, "runs": 1, "found": 1, "missed": 0, "false_rows": 0,
    }  # fmt: skip
    assert parts["cases"]["facts"]["all"] == {"runs": 3, "found": 3, "missed": 0, "false_rows": 0}
    assert "c10_progress_bar" in out


def test_a_missed_mark_and_a_false_row_fail(run: Run, machine: Any, check: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "c98_wrong.py").write_text(
        "from common import busy, device, steps\n"
        "import torch\n"
        "for _ in steps():\n"
        "    busy()\n"
        "    torch.ones(3).sum().item()\n"
        "    torch.ones(3).sum()  # FIND: scalar read\n"
    )
    free = tmp_path / "f99_free.py"
    free.write_text("from common import busy, steps\nfor _ in steps():\n    busy(1)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(check.sync_case.FOLDER)
        patch.setattr(check.sync_case, "FOLDER", tmp_path)
        patch.setattr(check.sync_case, "FREE", [free])
        patch.setitem(check.ITEMS, "cases", ["c98_wrong", "c99_missing", "f99_free"])
        status, out, parts = run("cases")
    assert status == 1
    failures = parts["cases"]["failures"]
    assert parts["cases"]["result"] == "FAILED"
    assert "c98_wrong:6 scalar read was not found in 1 of 1 runs" in failures
    assert "c98_wrong:5 scalar read has no mark, in 1 of 1 runs" in failures
    assert any(text.startswith("c99_missing: ") for text in failures)
    assert parts["cases"]["rows"][0] | {"runs": 0} == {
        "case": "c98_wrong", "steps": 5, "runs": 0, "found": 0, "missed": 1, "false_rows": 1,
    }  # fmt: skip
    assert "FAILED" in out
    rows = {(row["case"], row["steps"]): row for row in parts["cases"]["rows"]}
    assert rows["f99_free", 200]["runs"] == 1
    assert not any("f99" in text for text in failures)


def repeated(
    check: ModuleType,
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    found: Sequence[Sequence[tuple[int, str]]],
    steps: int = 5,
) -> Any:
    """What the tool makes of a case whose runs find so, a second each."""
    done = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: seconds)
    seconds = 0.0

    def ran(path: Path, **_: Any) -> Any:
        nonlocal seconds
        seconds += 1
        rows = [check.Row(str(path), line, "f", "", kind, "aten::x") for line, kind in found[next(done)]]
        return check.loops.Report(rows=rows, steps=steps)

    monkeypatch.setattr(check, "time", clock)
    monkeypatch.setattr(check.sync_case, "run", ran)
    check.check_case("c03_fill_with_tensor", len(found) + 0.5, machine, noted := check.Check())
    assert noted.rows[0]["runs"] == len(found)
    return noted


@pytest.mark.parametrize("times", [0, 9, 13, 14, 27])
def test_a_mark_is_missed_if_most_runs_miss_it(
    check: ModuleType, machine: Any, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    c03 = repeated(check, machine, monkeypatch, [[(11, "inside an op")] * (i >= times) for i in range(27)])
    text = f"c03_fill_with_tensor:11 inside an op was not found in {times} of 27 runs"
    assert c03.failures == ([text] if times > 13 else [])
    assert c03.facts.get("c03_fill_with_tensor", {}).get("missed_at_times") == ([text] if 0 < times < 14 else None)
    assert c03.rows[0]["missed"] == times
    assert c03.rows[0]["found"] == 27 - times


def test_each_row_without_a_mark_fails_once(check: ModuleType, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = [(11, "inside an op")]
    rows = [marked + [(10, "explicit")] * (i in (3, 7)) + [(9, "explicit")] * (i == 3) for i in range(20)]
    c03 = repeated(check, machine, monkeypatch, rows)
    assert c03.failures == [
        "c03_fill_with_tensor:9 explicit has no mark, in 1 of 20 runs",
        "c03_fill_with_tensor:10 explicit has no mark, in 2 of 20 runs",
    ]
    assert c03.rows[0]["false_rows"] == 3


def test_what_fails_each_time_is_said_once(check: ModuleType, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    c03 = repeated(check, machine, monkeypatch, [[(11, "inside an op")]] * 4, steps=3)
    assert c03.failures == ["c03_fill_with_tensor: 3 of 5 steps were measured"]


def test_too_few_steps_fail(run: Run, machine: Any) -> None:
    """On the CPU this case has 12 steps."""
    status, _, parts = run("cases", "--only", "f01_train")
    assert (status, parts["cases"]["failures"]) == (1, ["f01_train: 10 of 200 steps were measured"])


def test_pinned_blocks_of_earlier_runs_are_given_back(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    report = check.loops.Report()

    def ran(*_: Any, **__: Any) -> Any:
        order.append("run")
        return SimpleNamespace(status=0, report=report)

    monkeypatch.setattr(check.sync_case.runner, "run", ran)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch._C._host_emptyCache", lambda: order.append("empty"), raising=False)
    assert check.sync_case.run(check.sync_case.PATHS[0]) is report
    assert order == ["empty", "run"]
    monkeypatch.delattr("torch._C._host_emptyCache")  # as in a build without CUDA
    check.sync_case.run(check.sync_case.PATHS[0])
    assert order == ["empty", "run", "run"]


# ------------------------------------------------------------------------------------------------------------- overhead


class Slower(TorchDispatchMode):
    """Work on the simulated GPU for each op."""

    def __init__(self, gpu: Any) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.gpu.work(1e-3)
        return func(*args, **(kwargs or {}))


def test_overhead(run: Run, machine: Any) -> None:
    status, out, parts = run("overhead")
    assert status == 0, out
    rows = parts["overhead"]["rows"]
    assert [(row["step"], row["tool"], row["bar_percent"]) for row in rows] == [
        ("gpu_bound", "detector", 2.0), ("gpu_bound", "timer", 10.0), ("host_bound", "detector", None),
        ("host_bound", "timer", None),
    ]  # fmt: skip
    assert all(
        row["least_percent"] <= row["longer_percent"] <= row["most_percent"] and row["rounds"] >= 5 for row in rows
    )
    assert abs(rows[0]["longer_percent"]) < 0.1  # the tools take none of the simulated time
    assert parts["overhead"]["facts"]["gpu_bound"]["plain_ms"] > 1


@pytest.mark.parametrize("quiet", [True, False])
def test_a_costly_tool_fails_where_it_is_quiet(
    run: Run, machine: Any, check: ModuleType, monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    no_sync = check.no_sync

    @contextmanager
    def costly(mode: str) -> Iterator[Any]:
        with Slower(machine.gpu), no_sync(mode) as checked:
            yield checked

    monkeypatch.setattr(check, "no_sync", costly)
    if not quiet:
        times = itertools.chain([1.0] * 21, itertools.repeat(1.2))
        monkeypatch.setattr(check, "host_ms", lambda: next(times))
    status, out, parts = run("overhead", "--only", "gpu_bound")
    failures = parts["overhead"]["failures"]
    if quiet:
        assert status == 1
        assert len(failures) == 1
        assert "gpu_bound: detector makes a step" in failures[0]
    else:
        assert (status, failures, parts["overhead"]["result"]) == (check.NO_CONCLUSION, [], "noisy")
        assert parts["overhead"]["noise"] == ["gpu_bound: the host's own work took +20% at the end"]
        assert "noisy" in out


def test_ops_of_the_step(check: ModuleType, machine: Any) -> None:
    """The layers are chosen for about 800 ops."""
    ops = [0]

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops[0] += 1
            return func(*args, **(kwargs or {}))

    step = check.loops.Step(machine, 18, 8, 4)
    step()
    with Count():
        step()
    assert 780 <= ops[0] <= 820


# -------------------------------------------------------------------------------------------------------------- ranking


def test_ranking(check: ModuleType, monkeypatch: pytest.MonkeyPatch, run: Run, machine: Any, tmp_path: Path) -> None:
    # What takes a wait's place is some ops, of which each is much on this card.
    monkeypatch.setattr(check, "ALIKE", 0.05)
    status, out, parts = run("ranking", "--only", "large")
    assert status == 0, out
    facts = parts["ranking"]["facts"]["large"]
    assert facts["conclusion"] == "right order"
    assert facts["other_waits"] == []
    assert all(abs(error) < 5 for error in facts["replay_error_percent"])
    assert facts["saves"]["largest_error_ms"] < 0.1
    rows = {row["wait"]: row for row in parts["ranking"]["rows"]}
    assert len(rows) == 7
    assert rows["7 reads"]["calls"] == 2  # two lines that go together
    assert rows["4 divisor"]["idle_predicted_ms"] > 0
    assert {name.rpartition("_")[0] for name in rows["7 reads"] if name.endswith("_ms")} == {
        f"{cost}_{what}" for cost in ("saves", "idle") for what in ("predicted", "measured", "noise")
    }


def test_picture(check: ModuleType, monkeypatch: pytest.MonkeyPatch, run: Run, machine: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(check.PARTS, "ranking", lambda *_: None)
    picture = tmp_path / "finder.svg"
    assert run("ranking", "--svg", str(picture))[0] == 0
    assert "<svg" in picture.read_text(encoding="utf-8")
    report = json.loads(picture.with_suffix(".json").read_text(encoding="utf-8"))
    assert report["device"] == "simulated GPU"
    assert {row["file"] for row in report["rows"]} == {"examples/waiting_loop.py"}


def test_each_wait_is_found_in_the_waiting_loop(check: ModuleType, machine: Any) -> None:
    found = check.predict(check.loops.LOOPS["waiting_loop"](machine), machine)
    calls = found["calls"]
    assert {name for name, count in calls.items() if count} >= {"mask", "nan", "norm", "loss"}
    assert calls["mask"] == 2  # in backward too
    assert found["elsewhere"] == []


class Costs:
    """A loop whose measured step follows from what its waits cost."""

    def __init__(self, costs: dict[str, float], base: Callable[[], float] = lambda: 10.0) -> None:
        self.waits = {name: (name,) for name in costs}
        self.costs, self.base = costs, base

    def step_ms(self, without: Collection[str]) -> float:
        return self.base() - sum(self.costs[name] for name in without)


def compared(check: ModuleType, monkeypatch: pytest.MonkeyPatch, run: Run, loop: Costs, said: dict[str, float]) -> Any:
    """What the tool makes of a loop when the finder says so."""
    found = {"error": 0.0, "all": 3.0, "calls": dict.fromkeys(said, 1.0), "saves": said, "idle": said, "elsewhere": []}
    monkeypatch.setattr(check, "predict", lambda *_: found)
    monkeypatch.setattr(check.loops, "LOOPS", {"small": lambda _: loop})
    status, out, parts = run("ranking", "--only", "small")
    return status, out, parts["ranking"]


def test_a_wrong_prediction_fails(check: ModuleType, monkeypatch: pytest.MonkeyPatch, run: Run, machine: Any) -> None:
    costs = {"a": 3.0, "b": 1.0, "c": 0.1, "d": 0.0}
    status, out, part = compared(check, monkeypatch, run, Costs(costs), costs | {"c": 0.0, "d": 0.1})
    assert (status, part["result"]) == (0, "ok"), out  # costs that are alike have no order
    status, out, part = compared(check, monkeypatch, run, Costs(costs), costs | {"b": 3.5})
    assert (status, part["result"]) == (1, "FAILED")
    text = "a costs more than b, against the prediction"
    assert part["failures"] == [f"small, saves: {text}", f"small, idle: {text}"]
    assert part["facts"]["small"]["conclusion"] == "wrong order"
    assert part["facts"]["small"]["saves"]["rank_correlation"] == pytest.approx(0.8)
    assert "wrong order" in out


@pytest.mark.parametrize("what", ["host", "step", "repeats"])
def test_nothing_is_concluded_from_a_noisy_machine(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, run: Run, machine: Any, what: str
) -> None:
    drift = itertools.count()
    base = (lambda: 10.0 + 0.1 * next(drift)) if what == "step" else (lambda: 10.0)
    if what == "host":
        times = itertools.chain([1.0] * 21, itertools.repeat(0.9))
        monkeypatch.setattr(check, "host_ms", lambda: next(times))
    if what == "repeats":
        values = itertools.cycle([1.0, 1.1])
        monkeypatch.setattr(check, "host_ms", lambda: next(values))
    status, out, part = compared(check, monkeypatch, run, Costs({"a": 3.0, "b": 1.0}, base), {"a": 1.0, "b": 3.0})
    assert (status, part["result"], part["failures"]) == (check.NO_CONCLUSION, "noisy", [])
    assert part["facts"]["small"]["conclusion"] == "none: the machine was not quiet"
    reason = {
        "host": "own work took -10% at the end",
        "step": "the plain step took",
        "repeats": "own work varied by 10%",
    }
    assert any(reason[what] in text for text in part["noise"])
    assert "the machine was not quiet" in out


def test_rank_correlation(check: ModuleType) -> None:
    assert check.rank_correlation([1, 2, 3], [10, 20, 15]) == pytest.approx(0.5)
    assert check.rank_correlation([1, 1, 2], [5, 5, 9]) == pytest.approx(1.0)
    assert check.rank_correlation([1, 1, 1], [1, 2, 3]) is None


# ------------------------------------------------------------------------------------------------------------- trainers


@pytest.mark.parametrize("name", ["trainer", pytest.param("sft", marks=pytest.mark.slow)])
def test_trainers(run: Run, machine: Any, name: str) -> None:
    for needed in ("transformers", "accelerate", *(("datasets", "trl") if name == "sft" else ())):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    status, out, parts = run("trainers", "--only", name, "--seconds", "60")
    assert status == 0, out
    facts = parts["trainers"]["facts"][name]
    assert facts["first_loss_difference"] < 1e-5
    assert facts["ours_peak_mib"] is None
    assert {row["loss"] for row in parts["trainers"]["rows"]} == {"stock", "ours"}
    assert not any(row["names_us"] for row in parts["trainers"]["rows"])


def test_a_row_that_names_this_package_fails(
    check: ModuleType, machine: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = check.sites.short_path(os.path.dirname(check.syncfree_ext.__file__))  # noqa: PTH120

    def trained(_: Any, name: str, ours: bool) -> Any:
        rows = [
            check.Row("train.py", 3, "f", "", "scalar read", "aten::x", via=f"{package}/syncs/timer.py:3"),
            check.Row("train.py", 4, "f", "", "scalar read", "aten::x", via=f"{package}/modules.py:7"),
        ]
        report = check.loops.Report(rows=rows, steps=5)
        return report, [2.0, 1.0] if ours or name == "trainer" else [3.0, 1.0], 100.0

    monkeypatch.setattr(check.loops, "missing", lambda sft: None)
    monkeypatch.setattr(check.loops, "train_with", trained)
    check.torch._dynamo.utils.counters.clear()
    monkeypatch.setitem(check.ITEMS, "trainers", ["trainer", "sft", "trainer_compiled"])
    status, _, parts = run("trainers", "--seconds", "60")
    part = parts["trainers"]
    assert status == 1
    assert "trainer: a row names this package: train.py:4 scalar read" in part["failures"]
    assert not any("train.py:3" in text for text in part["failures"])
    assert "sft: the losses differ by 3.3e-01 in the first step" in part["failures"]
    assert "trainer_compiled, ours: nothing was compiled" in part["failures"]


def test_what_is_not_installed_is_skipped(
    check: ModuleType, machine: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, out, parts = run("trainers", "--only", "sft")
    assert (status, parts["trainers"]["result"]) == (0, "skipped")
    assert "transformers" in parts["trainers"]["skipped"][0]
    assert "skipped" in out
    monkeypatch.setattr(check.loops, "missing", lambda sft: None)
    _, _, parts = run("trainers", "--only", "trainer")
    assert parts["trainers"]["skipped"] == ["trainer: the time is up"]


# ----------------------------------------------------------------------------------------------------- the command line


def test_all_parts_and_a_part_that_breaks(
    check: ModuleType, machine: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("as planned")

    monkeypatch.setitem(check.PARTS, "overhead", broken)
    status, out, parts = run("all", "--only", "c10*,gpu_bound")
    assert status == 1
    assert {name: part["result"] for name, part in parts.items()} == {"cases": "ok", "overhead": "FAILED"}
    assert parts["overhead"]["failures"] == ["gpu_bound: RuntimeError: as planned"]
    assert "Traceback" in out


def test_without_a_gpu_nothing_is_known(check: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, out, parts = run("all")
    assert (status, parts) == (check.NO_CONCLUSION, {})
    assert "no CUDA device" in out


@pytest.mark.parametrize(
    ("arguments", "says"), [(("everything",), "unknown part"), (("cases", "--only", "c77*"), "c77")]
)
def test_wrong_options(run: Run, machine: Any, arguments: tuple[str, ...], says: str) -> None:
    status, out, _ = run(*arguments)
    assert status == 2
    assert says in out
