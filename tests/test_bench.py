"""The benchmark at tiny shapes: it refuses wrong heads, resumes, merges, compares, and draws what it measured."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("bench", reason="the benchmark is part of the checkout, not of the wheel")

from bench import compare, data, fetch_peers, figures, heads, plots, reference, results, shapes, table, timing
from bench import device as devices
from bench.context import Context, parse_dtype
from bench.heads.base import Head, UnavailableError
from bench.results import Store
from bench.routines import NAMES, common, load, ragged, step

TINY = shapes.Shape("tiny", 48, 16, 97)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def context(path: Path | None = None, where: str | torch.device = "cpu", **options: Any) -> Context:
    """A context for runs of milliseconds."""
    where = torch.device(where)
    options = {"shapes": [TINY], "heads": ["torch"], "rounds": 2, "block_ms": 0.0, "echo": lambda _: None, **options}
    return Context(device=where, store=Store(path, where), **options)


def right(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), t)


def half_gradient(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    loss = right(x, w, t)
    return loss / 2 + loss.detach() / 2


def nan_gradient(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    loss = right(x, w, t)
    return loss + 0 * (loss - loss.detach()).sqrt()


def raising(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    raise RuntimeError("no kernel\nfor this shape")


def only_with_gradients(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        raise RuntimeError("no forward of its own")
    return right(x, w, t)


@pytest.fixture
def fake_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, Callable[..., Tensor]] = {
        "torch": right,
        "torch-fp32": half_gradient,
        "torch-lce": raising,
        "liger": nan_gradient,
        "quack": only_with_gradients,
    }

    def fake_load(name: str, where: torch.device) -> Head:
        if name not in calls:
            raise UnavailableError(f"{name} is not installed")
        return Head(name, "fake", calls[name])

    monkeypatch.setattr(heads, "load", fake_load)


# ------------------------------------------------------------------------------------------------------ shapes and data


def test_shapes_are_names_rows_or_sizes() -> None:
    llama, short, own = shapes.parse("llama8b, llama8b:6144,7x8x9")
    assert (llama.BT, llama.H, llama.V) == (8192, 4096, 128256)
    assert (short.name, short.BT, short.V) == ("llama8b:6144", 6144, 128256)
    assert (own.BT, own.H, own.V) == (7, 8, 9)
    with pytest.raises(ValueError, match="llama9b"):
        shapes.parse("llama9b")


def test_dtypes_have_short_names() -> None:
    assert parse_dtype("bf16") == parse_dtype("bfloat16") == torch.bfloat16
    with pytest.raises(ValueError, match="int8"):
        parse_dtype("int8")


@pytest.mark.parametrize("kind", data.KINDS)
def test_data_is_finite_and_the_same_each_time(kind: str) -> None:
    a, b = (data.make(TINY, kind, torch.float32, ignored=0.5) for _ in range(2))
    for name in ("x", "w", "t"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    assert a.x.isfinite().all()
    assert a.w.isfinite().all()
    ignored = (a.t == data.IGNORE).sum().item()
    assert 0 < ignored < TINY.BT
    valid = a.t[a.t != data.IGNORE]
    assert 0 <= valid.min() <= valid.max() < TINY.V


def test_confident_data_is_confident() -> None:
    batch = data.make(shapes.Shape("", 256, 128, 2000), "confident", torch.float32)
    logits = batch.x @ batch.w.t()
    assert 9 < logits.square().mean().sqrt().item() < 12
    assert F.cross_entropy(logits, batch.t).item() < 0.1


def test_rotation_outgrows_the_cache() -> None:
    batch = data.make(TINY)
    assert len(data.rotation(batch, 3 * batch.nbytes)) == 3
    assert len(data.rotation(batch, 1)) == 1


# ------------------------------------------------------------------------------------------------------------ reference


@pytest.mark.parametrize("ignored", [0.0, 0.5])
def test_reference_is_what_autograd_gives_in_float64(ignored: float) -> None:
    batch = data.make(TINY, "unit", torch.bfloat16, ignored=ignored)
    x, w = (a.double().requires_grad_() for a in (batch.x, batch.w))
    loss = F.cross_entropy(x @ w.t(), batch.t)
    loss.backward()
    assert x.grad is not None
    assert w.grad is not None
    error = reference.errors(reference.reference(batch, full=True), loss.item(), x.grad, w.grad)
    assert max(error.values()) < 1e-12


@pytest.mark.parametrize("kind", ["unit", "confident"])
def test_sampled_reference_agrees_with_the_full_one(kind: str) -> None:
    batch = data.make(shapes.Shape("", 600, 16, 700), kind, torch.bfloat16, ignored=0.25)
    full, sampled = (reference.reference(batch, full=f) for f in (True, False))
    assert sampled.rows is not None
    assert sampled.classes is not None
    assert "256 rows" in sampled.method
    error = reference.errors(sampled, full.loss, full.dx, full.dw)
    assert error["dx"] < 1e-12
    assert error["dw"] < 1e-4
    assert error["loss"] < 1e-4


def test_nan_is_wrong() -> None:
    assert common.wrong({"loss": math.nan, "dx": 0.0, "dw": 0.0})
    assert common.wrong({"loss": 0.0, "dx": math.nan, "dw": 0.0})
    assert common.wrong({"loss": 0.0, "dx": 1e-3, "dw": 1e-3}) is None


# -------------------------------------------------------------------------------------------------- timing and memory


def test_a_record_keeps_its_command_without_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a b.json"
    monkeypatch.setattr(sys, "argv", ["/somewhere/bench/__main__.py", "flce", "--shapes", "tiny", "--json", str(path)])
    store = results.Store(path, torch.device("cpu"))
    store.add({"routine": "flce", "head": "syncfree", "status": "ok"})
    assert results.read(path)["records"][0]["command"] == "bench flce --shapes tiny --json 'a b.json'"


def test_stat_takes_medians_of_rounds() -> None:
    s = timing.stat([[1.0, 9.0, 2.0], [4.0], [3.0, 3.0]])
    assert (s.median, s.lo, s.hi, s.n) == (3.0, 2.0, 4.0, 6)


def test_a_participant_that_fails_leaves_the_others_alone() -> None:
    def good(call: int, mark: devices.Marks) -> None:
        mark("start")
        mark("half")
        mark("end")

    def bad(call: int, mark: devices.Marks) -> None:
        raise RuntimeError("out of memory\nand more")

    both = [timing.Participant("bad", bad), timing.Participant("good", good)]
    timing.interleave(both, torch.device("cpu"), rounds=3, block_ms=0.0)
    assert both[0].failure == "RuntimeError: out of memory"
    assert len(both[1].parts["total"]) == 3
    assert set(both[1].stats()) == {"half", "end", "total"}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 40])
def test_in_each_round_everyone_follows_somebody_else(count: int) -> None:
    rounds = min(5, count)
    orders = [timing.order_of_round(count, number) for number in range(rounds)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len({tuple(order) for order in orders}) == rounds
    followed = Counter(pair for order in orders for pair in itertools.pairwise(order))
    # With an odd number of participants it takes twice as many rounds to be balanced.
    assert max(followed.values(), default=0) <= 1 + count % 2


def test_interleaved_rounds_have_that_order() -> None:
    seen: list[str] = []

    def one(name: str) -> timing.Participant:
        def step(call: int, mark: devices.Marks) -> None:
            mark("start")
            if not seen or seen[-1] != name:
                seen.append(name)
            mark("end")

        return timing.Participant(name, step)

    everyone = [one(name) for name in "abcd"]
    timing.interleave(everyone, torch.device("cpu"), rounds=4, block_ms=0.0)
    expected = ["abcd"[i] for number in range(4) for i in timing.order_of_round(4, number)]
    assert seen == [name for i, name in enumerate(expected) if i == 0 or name != expected[i - 1]]
    assert all(len(participant.parts["total"]) == 4 for participant in everyone)


def test_one_round_runs_past_the_deadline() -> None:
    def good(call: int, mark: devices.Marks) -> None:
        mark("start")
        mark("end")

    one = timing.Participant("good", good)
    timing.interleave([one], torch.device("cpu"), rounds=3, block_ms=0.0, deadline=0.0)
    assert len(one.parts["total"]) == 1


def test_peak_memory_sees_what_was_freed_again(device: torch.device) -> None:
    def work() -> Tensor:
        kept = torch.empty(2**20, dtype=torch.uint8, device=device)
        torch.empty(2**22, dtype=torch.uint8, device=device)
        return kept

    work()
    peak = devices.peak_memory(work, device)
    assert 2**20 + 2**22 <= peak < 2**20 + 2**22 + 2**16


# ------------------------------------------------------------------------------------------------------------- routines


@pytest.mark.usefixtures("fake_heads")
def test_wrong_heads_are_refused_and_missing_ones_skipped() -> None:
    ctx = context(heads=["torch", "torch-fp32", "torch-lce", "liger", "quack", "cce"])
    load("flce").run(ctx)
    found = {r["head"]: r for r in ctx.store.data["records"]}
    assert found["torch"]["status"] == "ok"
    assert found["torch"]["x_limit"] > 0
    assert found["torch"]["error"]["dw"] < 5e-3
    for name in ("torch-fp32", "liger"):
        assert found[name]["status"] == "wrong"
        assert "relative error of dx" in found[name]["reason"]
        assert "train_ms" not in found[name]
    assert found["torch-lce"]["status"] == "failed"
    assert found["torch-lce"]["reason"] == "RuntimeError: no kernel"
    assert found["cce"] == {**found["cce"], "status": "skipped", "reason": "cce is not installed"}
    assert found["quack"]["status"] == "ok"
    assert found["quack"]["infer_failure"] == "RuntimeError: no forward of its own"
    assert "infer_ms" not in found["quack"]
    assert {"limit", "limit-real"} <= set(found)


@pytest.mark.parametrize("name", ["flce", "exact", "ragged", "memory", "backlog", "step", "options", "rows"])
def test_routine_runs(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "FRACTIONS", (0.5,))
    ctx = context(where=device, heads=["syncfree", "syncfree-lean@16", "torch"], data=["unit"])
    load(name).run(ctx)
    records = [r for r in ctx.store.data["records"] if r["head"].startswith("syncfree")]
    assert records
    assert [r for r in records if r["status"] != "ok"] == []
    assert table.tables(ctx.store.data)


def test_an_option_that_is_wrong_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    options = importlib.import_module("bench.routines.options")
    right = options._loss
    monkeypatch.setattr(options, "_loss", lambda batch, given: right(batch, given) * (1.5 if "softcap" in given else 1))
    ctx = context(shapes=[shapes.Shape("", 64, 16, 97)])
    load("options").run(ctx)
    found = {r["variant"]: r for r in ctx.store.data["records"]}
    capped = {name for name in found if "softcap" in name}
    assert len(capped) == 2
    assert {name for name, r in found.items() if r["status"] != "ok"} == capped
    for name in capped:
        assert found[name]["status"] == "wrong"
        assert "relative error of loss is 0.5" in found[name]["reason"]
        assert "train_ms" not in found[name]
    assert found["none"]["x_none"] == 1
    assert found["bias"]["x_none"] == found["bias"]["train_ms"]["median"] / found["none"]["train_ms"]["median"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scale", "overhead", "gemm"])
def test_slow_routine_runs(name: str, device: torch.device) -> None:
    shape = shapes.Shape("", 512, 16, 97)
    ctx = context(where=device, heads=["syncfree", "torch"], shapes=[shape])
    load(name).run(ctx)
    assert {r["status"] for r in ctx.store.data["records"]} == {"ok"}
    assert table.tables(ctx.store.data)


def test_cpu_routine_covers_both_dtypes() -> None:
    ctx = context(heads=["torch", "torch-fp32"])
    load("cpu").run(ctx)
    seen = {(r["head"], r["dtype"]) for r in ctx.store.data["records"] if not r["head"].startswith("limit")}
    assert seen == {("torch", "float32"), ("torch", "bfloat16"), ("torch-fp32", "bfloat16")}


def test_every_routine_says_what_it_does() -> None:
    assert all(load(name).help.endswith(".") for name in NAMES)
    with pytest.raises(ValueError, match="nonsense"):
        load("nonsense")


def test_offloaded_step_learns_like_a_plain_one() -> None:
    batch = data.make(TINY, "unit", torch.float32)
    trainer = step.Trainer(batch, blocks=4)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    times = trainer.step(right)
    assert times["step_ms"] >= times["host_forward_ms"] + times["host_backward_ms"]
    moved = [p.detach().clone() for p in trainer.model.parameters()]
    with torch.no_grad():
        for p, old in zip(trainer.model.parameters(), before, strict=True):
            p.copy_(old)
        trainer.weight.copy_(batch.w)
    trainer.model.zero_grad()
    right(trainer.model(batch.x), trainer.weight, batch.t).backward()
    for p, old, new in zip(trainer.model.parameters(), before, moved, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(new, old - 1e-3 * p.grad)


def test_idle_time_is_the_length_of_the_gaps() -> None:
    assert step.idle([(0, 10), (5, 20), (25, 30), (26, 28), (31, 32)]) == 6


# -------------------------------------------------------------------------------------------------------------- results


def record(head: str, status: str = "ok", **fields: Any) -> results.Record:
    size = {"BT": 8192, "H": 4096, "V": 128256}
    identity = {
        "routine": "flce",
        "shape": "llama8b",
        "dtype": "bfloat16",
        "data": "unit",
        "ignored": 0.0,
        "variant": "",
    }
    return {"status": status, "head": head, **identity, **size, "date": "2026-01-02T00:00:00Z", **fields}


def ms(median: float, spread: float = 0.01) -> dict[str, float]:
    return {"median": median, "lo": median * (1 - spread), "hi": median * (1 + spread), "n": 10}


def result(*records: results.Record, name: str = "Test GPU", kind: str = "cuda") -> dict[str, Any]:
    environment = {"device": name, "kind": kind, "driver": "1", "torch": "2", "packages": {"liger-kernel": "0.8.5"}}
    return {"format": results.FORMAT, "environments": {name: environment}, "records": list(records)}


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    load("memory").run(context(path))
    first = results.read(path)
    assert [r["status"] for r in first["records"]] == ["ok"]

    load("memory").run(context(path))
    assert results.read(path) == first

    # The records of another file count as done; those of a head that was missing there do not.
    ctx = context(heads=["torch", "liger"])
    ctx.store.resume([tmp_path])
    load("memory").run(ctx)
    assert [(r["head"], r["status"]) for r in ctx.store.data["records"]] == [("liger", "skipped")]
    assert ctx.todo(["torch"], **{k: first["records"][0][k] for k in results.KEY if k != "head"}) == []


def test_time_limit_stops_before_the_next_batch() -> None:
    said: list[str] = []
    ctx = context(deadline=0.0, echo=said.append)
    load("flce").run(ctx)
    assert ctx.store.data["records"] == []
    assert said == ["time limit reached: run the same command again to go on where this one stopped"]


def test_merge_keeps_the_later_record_unless_it_is_a_skip() -> None:
    old = result(record("torch", peak_mib=1.0), record("liger", peak_mib=2.0))
    new = result(record("torch", peak_mib=3.0), record("liger", "skipped"), record("cce", "skipped"))
    merged = {r["head"]: r for r in results.merge([old, new])["records"]}
    assert merged["torch"]["peak_mib"] == 3.0
    assert merged["liger"]["peak_mib"] == 2.0
    assert merged["cce"]["status"] == "skipped"
    with pytest.raises(ValueError, match="Other GPU"):
        results.merge([old, result(record("torch"), name="Other GPU")])


def test_result_files_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a" / "r.json"
    results.write(path, result(record("torch", train_ms=ms(1.23456789))))
    assert results.read(path)["records"][0]["train_ms"]["median"] == 1.2346
    (tmp_path / "bad.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(ValueError, match="format"):
        results.read(tmp_path / "bad.json")


# -------------------------------------------------------------------------------------------------------------- compare

GOOD = record(
    "syncfree", train_ms=ms(40.0), x_limit=1.05, peak_mib=2600.0, error={"loss": 1e-7, "dx": 1.7e-3, "dw": 1.7e-3}
)


@pytest.mark.parametrize(
    ("change", "worse"),
    [
        ({}, []),
        ({"train_ms": ms(50.0), "x_limit": 1.05}, []),  # a slower day: the limit was slower too
        ({"train_ms": ms(42.0), "x_limit": 1.10}, ["x_limit"]),
        ({"train_ms": ms(42.0, 0.2), "x_limit": 1.10}, []),  # within the spread
        ({"peak_mib": 2700.0}, ["peak_mib"]),
        ({"error": {"loss": 1e-7, "dx": 2.5e-3, "dw": 1.7e-3}}, ["error of dx"]),
        ({"error": {"loss": 1e-7, "dx": math.nan, "dw": 1.7e-3}}, ["error of dx"]),
        ({"status": "wrong", "reason": "dx"}, ["was ok, is wrong"]),
    ],
)
def test_compare_finds_what_got_worse(change: dict[str, Any], worse: list[str]) -> None:
    found = compare.compare(result(GOOD), result({**GOOD, **change}), heads.parse("ours"))
    assert len(found.worse) == len(worse)
    assert all(word in line for word, line in zip(worse, found.worse, strict=True))


def test_compare_leaves_peers_alone_and_names_what_is_missing() -> None:
    slow = {**GOOD, "head": "liger", "x_limit": 9.0, "train_ms": ms(400.0)}
    found = compare.compare(result(GOOD, {**GOOD, "head": "liger"}), result(slow), heads.parse("ours"))
    assert (found.worse, len(found.missing)) == ([], 1)


# ------------------------------------------------------------------------------------------------- tables and figures


def test_pareto_front() -> None:
    assert plots.pareto([(1, 5), (2, 5), (2, 3), (3, 4), (4, 1), (4, 1)]) == [(1, 5), (2, 3), (4, 1)]


def full_result() -> dict[str, Any]:
    error = {"loss": 1e-7, "dx": 1.7e-3, "dw": 1.7e-3}
    timed = {"error": error, "rounding": error, "infer_ms": ms(13.0), "tflops": 600.0}
    records = [record("limit", train_ms=ms(37.0), tflops=690.0)]
    for i, head in enumerate(("syncfree", "syncfree-lean@1024", "torch", "liger-c8", "cce")):
        records.append(record(head, train_ms=ms(40.0 + 9 * i), x_limit=1.1 + i / 4, peak_mib=3000.0 + 5 * i, **timed))
    records.append(record("quack", "wrong", reason="relative error of dx is 0.5, more than 0.1"))
    records.append(record("fla", "skipped", reason="fla-core cannot be imported here"))
    for ignored in (0.0, 0.5):
        r = record("syncfree", train_ms=ms(40.0), x_limit=1.0 - ignored)
        records.append({**r, "routine": "ragged", "ignored": ignored})
    for BT in (1024, 2048):
        r = record("syncfree", train_ms=ms(40.0), x_limit=1.0, tflops=600.0)
        records.append({**r, "routine": "scale", "variant": "BT", "axis": "BT", "base": "llama8b", "BT": BT})
    times = {f"{on}_{part}_ms": ms(1.0) for on in ("host", "gpu") for part in ("forward", "backward")}
    r = record("syncfree", **times, syncs_forward=0, syncs_backward=0, copy_ms=38.0)
    records.append({**r, "routine": "backlog", "variant": "upstream 1"})
    return result(*records)


def test_tables_leave_out_empty_columns_and_say_why() -> None:
    times, exactness = table.tables(full_result())[:2]
    assert "× limit" in times.header
    assert "× real" not in times.header
    assert exactness.rows[-1][0] == "exact, rounded"
    text = times.markdown()
    assert "wrong: relative error of dx is 0.5" in text
    assert text.count("\n") == len(times.rows) + 1


def test_figures_fill_the_readme(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    readme = tmp_path / "README.md"
    empty = "".join(f"<!-- bench:{name} -->\nold\n<!-- /bench:{name} -->\n" for name in ("figures", "table"))
    body = f"before\n{empty}after\n"
    readme.write_text(body)
    folder = tmp_path / "bench" / "results"
    with pytest.raises(ValueError, match="no result files"):
        figures.update(readme, folder)
    results.write(folder / "2026-01-01-gpu.json", result(record("torch", "failed", reason="an old result")))
    gpu = full_result()
    gpu["records"] += [{**r, "shape": "gemma2b"} for r in gpu["records"] if r["routine"] == "flce"]
    results.write(folder / "2026-01-02-gpu.json", gpu)
    cpu = {**GOOD, "routine": "cpu", "shape": "cpu"}
    results.write(folder / "2026-01-02-cpu.json", result(cpu, name="Test CPU", kind="cpu"))

    assert figures.update(readme, folder, check=True)
    assert readme.read_text() == body
    assert figures.update(readme, folder)
    page = readme.read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page.split()
    for name in ("pareto", "ragged", "scale", "backlog", "cpu"):
        assert f"(bench/figures/{name}.svg)" in page
        assert (tmp_path / "bench" / "figures" / f"{name}.png").stat().st_size > 1000
    assert "**`syncfree`**" in page
    assert "three matrix products take 37.00 ms" in page
    assert page.index("Test GPU") < page.index("Test CPU")
    folded = re.findall(r'<details markdown="1"><summary>(.+?)</summary>\n\n\|.+?\|\n\n</details>', page, re.DOTALL)
    titles = [part.title for part in figures.summary_tables(gpu)]
    assert folded == titles[1:]
    assert len(folded) == page.count("<details") == page.count("</details>") > 0
    assert f"{titles[0]}:\n\n|" in page
    assert not figures.update(readme, folder, check=True)

    readme.write_text("no markers")
    with pytest.raises(ValueError, match="must hold"):
        figures.update(readme, folder)


# --------------------------------------------------------------------------------------------------------- command line


def run_command(*arguments: str) -> Any:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from bench.__main__ import app

    return CliRunner().invoke(app, list(arguments))


def test_command_runs_a_routine_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = ["--device", "cpu", "--shapes", "48x16x97", "--peers", "torch", "--rounds", "1", "--block-ms", "0"]
    done = run_command("flce", *options, "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "torch" in done.output
    data_read = results.read(path)
    assert {r["head"] for r in data_read["records"]} == {"torch", "limit", "limit-real"}
    assert next(iter(data_read["environments"].values()))["torch"] == torch.__version__


def test_command_refuses_what_it_does_not_know() -> None:
    for wrong in (("--shapes", "huge"), ("--peers", "nobody"), ("--dtype", "int4"), ("--data", "zeros")):
        done = run_command("flce", "--device", "cpu", *wrong)
        assert done.exit_code == 2
        assert wrong[1] in done.output


def test_command_compare_exits_by_what_it_finds(tmp_path: Path) -> None:
    for name, data_written in (("a", GOOD), ("b", {**GOOD, "peak_mib": 9999.0})):
        results.write(tmp_path / f"{name}.json", result(data_written))
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    assert run_command("compare", a, a).exit_code == 0
    assert run_command("compare", b, a).exit_code == 0
    done = run_command("compare", a, b)
    assert done.exit_code == 1
    assert "peak_mib 2600 -> 9999" in done.output
    assert run_command("compare", a, str(tmp_path / "none.json")).exit_code == 2


def test_command_merges_parts(tmp_path: Path) -> None:
    for name in ("torch", "liger"):
        results.write(tmp_path / "parts" / f"{name}.json", result(record(name, peak_mib=1.0)))
    out = tmp_path / "all.json"
    assert run_command("merge", str(tmp_path / "parts"), "--json", str(out)).exit_code == 0
    assert {r["head"] for r in results.read(out)["records"]} == {"torch", "liger"}


# ----------------------------------------------------------------------------------------------------------- fetching


def test_wheels_are_cut_and_put_together_again(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    contents = {"big-1.whl": bytes(range(256)) * 10_000, "small-1.whl": b"abc"}
    for name, content in contents.items():
        (wheels / name).write_bytes(content)
    parts = fetch_peers.split(wheels, 1)
    assert len(parts) == 3
    assert all(sum(p.stat().st_size for p in part.iterdir()) <= 10**6 for part in parts)
    with pytest.raises(ValueError, match="pieces of big-1"):
        fetch_peers.collect(parts[1:], tmp_path / "broken")
    joined = fetch_peers.collect(parts, tmp_path / "joined")
    assert {p.name: p.read_bytes() for p in joined} == contents


def test_peers_are_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(name.count("==") == 1 for name in fetch_peers.requirements())
    assert fetch_peers.main(["list"]) == 0
    assert "liger-kernel==" in capsys.readouterr().out
