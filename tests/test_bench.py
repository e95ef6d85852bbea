"""The benchmark at tiny shapes: it draws data, refuses wrong heads, times, and goes on where it stopped."""

from __future__ import annotations

import importlib
import itertools
import math
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

from bench import data, heads, reference, results, shapes, table, timing
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
    assert found["torch"]["rounds"] == found["limit"]["rounds"] == ctx.rounds == 2
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
    assert all(0 < r["live_rows"] < r["BT"] for r in records if name == "ragged")
    assert table.tables(ctx.store.data)


def test_backlog_measures_what_its_variants_say(monkeypatch: pytest.MonkeyPatch) -> None:
    backlog = importlib.import_module("bench.routines.backlog")
    seen = []
    one_call = backlog._one_call

    def noted(head: Any, batch: Any, upstream: Tensor, copies: Any) -> Any:
        seen.append((float(upstream), torch.autograd.is_multithreading_enabled()))
        return one_call(head, batch, upstream, copies)

    monkeypatch.setattr(backlog, "_one_call", noted)
    ctx = context()
    load("backlog").run(ctx)
    assert set(seen) == {(1.0, True), (0.5, True), (1.0, False)}
    assert torch.autograd.is_multithreading_enabled()
    variants = [r["variant"] for r in ctx.store.data["records"] if r["status"] == "ok"]
    assert variants == ["upstream 1", "upstream 0.5", "upstream 1, one thread"]


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


# --------------------------------------------------------------------------------------------------------- going on


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
