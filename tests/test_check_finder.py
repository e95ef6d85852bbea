"""tools/check_finder.py on the simulated card: that each part runs, and that what is wrong is reported as such."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fake_gpu import fake_card

pytest.importorskip("typer", reason="typer is not installed")
pytest.importorskip("rich", reason="rich is not installed")

DRIFT = (1.0, 1.4, 1.1, 1.5, 1.25, 1.02, 1.33, 1.21)  # of the host's speed, round by round
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


def test_two_runs_are_too_few_to_miss_a_mark(check: ModuleType, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    c03 = repeated(check, machine, monkeypatch, [[(11, "inside an op")], []])
    assert c03.failures == ["c03_fill_with_tensor:11 inside an op was not found in 1 of 2 runs"]


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
def test_a_costly_tool_fails(
    run: Run, machine: Any, check: ModuleType, monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    """Whether or not the machine is quiet; that it is not is noted."""
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
    assert (status, parts["overhead"]["noise"]) == (1, [])
    assert len(failures) == 1
    assert "gpu_bound: detector makes a step" in failures[0]
    changed = [] if quiet else ["the host's own work took +20% at the end"]
    assert parts["overhead"]["facts"]["gpu_bound"]["machine"] == changed
    assert quiet or "took +20%" in out


@pytest.mark.parametrize(
    ("longer", "result"),
    [
        ([2.9, 3.0, 3.1, 2.9, 3.1], "FAILED"),
        ([0.9, 1.0, 1.1, 0.9, 1.1], "ok"),
        ([-9.0, 3.0, 15.0, 2.0, 4.0], "noisy"),  # far above the bar, by chance perhaps
        ([-9.0, 1.0, 11.0, 0.0, 2.0], "noisy"),  # below it, by chance perhaps
        ([-9.0, 1.0, 11.0, 0.0, 2.0] * 100, "ok"),  # more rounds tell
    ],
)
def test_a_tool_is_over_its_bar_beyond_the_noise(
    check: ModuleType, machine: Any, monkeypatch: pytest.MonkeyPatch, longer: list[float], result: str
) -> None:
    """The host's speed changes from round to round by up to a half, and ratios do not."""
    plain = [50.0 * DRIFT[i % len(DRIFT)] for i in range(len(longer))]
    slow = [ms * (1 + percent / 100) for ms, percent in zip(plain, longer, strict=True)]
    times = {"plain": plain, "detector": slow, "timer": plain}
    monkeypatch.setattr(check.rounds, "in_rounds", lambda *_, **__: times)
    check.check_overhead("gpu_bound", 0.0, machine, noted := check.Check())
    assert noted.result == result
    text = f"gpu_bound: detector makes a step {longer[1]:.3f} ± "
    assert all(reason.startswith(text) for reason in noted.failures + noted.noise)
    assert all("5 rounds cannot tell" in reason for reason in noted.noise)
    assert noted.rows[0]["deviation_percent"] > 0


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
    monkeypatch.setattr(check, "ALIKE", 0.03)
    status, out, parts = run("ranking", "--only", "large")
    assert status == 0, out
    facts = parts["ranking"]["facts"]["large"]
    assert facts["conclusion"] == "right order"
    assert facts["other_waits"] == []
    assert abs(facts["largest_replay_error_percent"]) < 5
    assert facts["machine"] == []
    assert facts["saves"]["in_order"] + facts["idle"]["in_order"] >= 10
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
    assert {row["file"] for row in report["rows"]} == {"examples/sync_free_loop.py"}
    assert report["steps"] == 5
    assert all(row["calls"] == round(row["calls"]) for row in report["rows"])  # each step is like the others


@pytest.mark.parametrize("arguments", [("overhead",), ("ranking", "--only", "small")])
def test_a_picture_that_nothing_draws(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    picture = tmp_path / "finder.svg"
    status, text, _ = run(*arguments, "--svg", str(picture))
    assert status == 2
    assert "is not asked for" in " ".join(text.replace("│", "").split())
    assert not picture.exists()


def test_each_wait_is_found_in_the_waiting_loop(check: ModuleType, machine: Any) -> None:
    script = check.ROOT / "examples" / "waiting_loop.py"
    report = check.runner.run(str(script), [], warmup=3, steps=5, gpu=machine.gpu).report
    lines = {row.source: row.calls for row in report.rows}
    texts = ("losses[counted].mean()", "torch.tensor(0.5", "elif torch.isnan(loss)", "norm.item()", "loss.item()")
    assert len(lines) == len(texts)
    assert all(any(text in source for source in lines) for text in texts)
    assert sum(row.calls for row in report.rows if texts[0] in row.source) == 2  # in backward too


class Costs:
    """A loop whose measured step follows from what its waits cost, and a finder that says so or otherwise.

    The speed of the host changes from round to round, and in each run there may be noise.
    """

    def __init__(self, costs: dict[str, float], said: dict[str, float], drift: Sequence[float] = (1.0,)) -> None:
        self.waits = {name: (name,) for name in costs}
        self.costs, self.said, self.drift, self.runs, self.predictions = costs, said, drift, 0, 0
        self.noise = self.blur = lambda: 0.0  # ms of a step, and of a prediction

    def speed(self) -> float:
        """Of this run. Before the rounds there are a run of each, and five of the plain step."""
        each = 2 * len(self.costs) + 3
        self.runs += 1
        return self.drift[(self.runs - 1 - each - 5) // each % len(self.drift)]

    def step_ms(self, without: Collection[str]) -> float:
        return self.speed() * (10.0 - sum(self.costs[name] for name in without)) + self.noise()

    def predict(self, *_: Any) -> dict[str, Any]:
        self.predictions += 1
        speed = self.speed()
        said = {name: speed * cost + self.blur() for name, cost in self.said.items()}
        calls = dict.fromkeys(said, 1.0)
        return {"error": 0.0, "step": 20.0, "all": 3.0, "calls": calls, "saves": said, "idle": said, "elsewhere": []}


def ranked(check: ModuleType, monkeypatch: pytest.MonkeyPatch, run: Run, loop: Costs, least: int = 3) -> Any:
    """What the tool makes of a loop in so many rounds: the status, what it prints, and the record."""
    monkeypatch.setattr(check, "predict", loop.predict)
    monkeypatch.setattr(check.loops, "LOOPS", {"small": lambda _: loop})
    monkeypatch.setattr(check.rounds, "in_rounds", partial(check.rounds.in_rounds, least=least))
    status, out, parts = run("ranking", "--only", "small")
    return status, out, parts["ranking"]


def test_a_wrong_prediction_fails(check: ModuleType, monkeypatch: pytest.MonkeyPatch, run: Run, machine: Any) -> None:
    costs = {"a": 3.0, "b": 1.0, "c": 0.1, "d": 0.0}
    status, out, part = ranked(check, monkeypatch, run, Costs(costs, costs | {"c": 0.0, "d": 0.1}))
    assert (status, part["result"]) == (0, "ok"), out  # costs that are alike have no order
    status, out, part = ranked(check, monkeypatch, run, Costs(costs, costs | {"b": 3.5}))
    assert (status, part["result"]) == (1, "FAILED")
    text = "a costs 2.000 ± 0.000 ms more than b, and -0.500 ± 0.000 ms are predicted"
    assert part["failures"] == [f"small, saves: {text}", f"small, idle: {text}"]
    facts = part["facts"]["small"]
    assert facts["conclusion"] == "wrong order"
    assert facts["saves"] == {
        "rank_correlation": pytest.approx(0.8), "in_order": 4, "undecided": 0, "out_of_order": 1,
        "largest_error_ms": pytest.approx(2.5), "undecided_pairs": [], "out_of_order_pairs": [text], "certain": [text],
    }  # fmt: skip
    assert "wrong order" in out


def test_a_drifting_host_is_told_from_a_wrong_prediction(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, run: Run, machine: Any
) -> None:
    """All steps, costs and predictions are up to a half longer in some rounds."""
    times = itertools.chain([1.0] * 21, itertools.repeat(1.5))
    monkeypatch.setattr(check, "host_ms", lambda: next(times))
    costs = {"a": 3.0, "b": 1.0, "c": 0.5, "d": 0.0}
    status, out, part = ranked(check, monkeypatch, run, loop := Costs(costs, costs, DRIFT), 8)
    assert (status, part["result"], part["noise"]) == (0, "ok", []), out
    facts = part["facts"]["small"]
    assert (facts["conclusion"], facts["rounds"]) == ("right order", 8)
    assert "the host's own work took +50% at the end" in facts["machine"]
    assert (facts["saves"]["in_order"], facts["idle"]["in_order"]) == (6, 6)
    assert loop.predictions == 9  # the first pays what is paid once
    assert facts["saves"]["largest_error_ms"] < 1e-9  # both sides met the same rounds
    assert part["rows"][0]["saves_noise_ms"] > 0.1  # of costs; their differences have less

    status, out, part = ranked(check, monkeypatch, run, Costs(costs, costs | {"c": 1.5}, DRIFT), 8)
    assert (status, part["result"]) == (1, "FAILED"), out
    assert len(part["failures"]) == 2
    assert all(" b costs 0.6" in text and "more than c, and -0.6" in text for text in part["failures"])


def test_noise_is_no_wrong_prediction(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, run: Run, machine: Any
) -> None:
    costs = {"a": 3.0, "b": 1.0, "c": 0.5, "d": 0.0}
    wrong = {"a": 0.0, "b": 0.5, "c": 1.0, "d": 3.0}

    def with_noise(said: dict[str, float], noise: float, blur: float) -> Any:
        draw, loop = random.Random(1), Costs(costs, said)
        loop.noise, loop.blur = (lambda: draw.gauss(0, noise)), (lambda: draw.gauss(0, blur))
        return ranked(check, monkeypatch, run, loop, 5)

    status, out, part = with_noise(wrong, 30.0, 0.01)
    assert (status, part["result"], part["failures"]) == (check.NO_CONCLUSION, "noisy", [])
    assert "pairs of costs can be told apart, in 5 rounds" in part["noise"][0]
    assert part["facts"]["small"]["conclusion"].startswith("none: only ")
    assert "none: only" in out
    status, out, part = with_noise(costs, 0.01, 30.0)
    assert (status, part["result"], part["failures"]) == (check.NO_CONCLUSION, "noisy", [])
    assert part["facts"]["small"]["saves"]["undecided"] > 3
    assert "the predictions leave" in part["noise"][0]
    assert with_noise(wrong, 0.01, 0.01)[2]["result"] == "FAILED"
    assert with_noise(costs, 0.01, 0.01)[2]["result"] == "ok"


def test_two_pairs_are_no_order(check: ModuleType, monkeypatch: pytest.MonkeyPatch, run: Run, machine: Any) -> None:
    for said in ({"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 3.0}):
        status, _, part = ranked(check, monkeypatch, run, Costs({"a": 3.0, "b": 1.0}, said))
        assert (status, part["failures"]) == (check.NO_CONCLUSION, [])
        assert part["noise"] == ["small: only 2 pairs of costs can be told apart, in 3 rounds"]


def test_predictions_that_say_nothing_are_not_right(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, run: Run, machine: Any
) -> None:
    costs = {"a": 3.0, "b": 1.0, "c": 0.5, "d": 0.0}
    status, _, part = ranked(check, monkeypatch, run, Costs(costs, dict.fromkeys(costs, 1.0)))
    assert (status, part["noise"]) == (
        check.NO_CONCLUSION, ["small: the predictions leave 12 of 12 pairs undecided, in 3 rounds"],
    )  # fmt: skip
    text = "a costs 2.000 ± 0.000 ms more than b, and 0.000 ± 0.000 ms are predicted"
    assert text in part["facts"]["small"]["idle"]["undecided_pairs"]


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
