"""Quick variants of tools/fuzz.py and tools/soak.py, and what these tools are made of."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import fuzz_cases
import fuzz_garbage
import soak_parts
import syncfree_ext
from fuzz_guards import Guards
from fuzz_threads import ThreadRanks
from helpers import REFUSED
from syncfree_ext import _dispatch

ROOT = Path(__file__).resolve().parent.parent
KINDS = sorted(fuzz_cases.kinds())


def tool(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# ----------------------------------------------------------------------------------------------------------------- fuzz


@pytest.mark.parametrize("kind", KINDS)
def test_random_calls(kind: str, device: torch.device) -> None:
    seed = int(os.environ["SYNCFREE_SEED"])
    for number in range(25):
        case = fuzz_cases.Case(seed, number, device)
        assert fuzz_cases.kind_of(case, (kind,)) == kind
        try:
            outcome = fuzz_cases.run_case(case, kind)
        except Exception as error:
            note = f"tools/fuzz.py --device {device.type} --only '{kind}' --replay {seed}:{number}\n"
            raise AssertionError(note + "\n".join(case.notes)) from error
        expected = ("survived", "refused", "discarded") if kind.startswith("garbage") else ("exact", "discarded")
        assert outcome in expected


def test_a_case_is_its_seed_and_number() -> None:
    for number in range(20):
        first, second = (fuzz_cases.Case(5, number, torch.device("cpu")) for _ in range(2))
        kind = fuzz_cases.kind_of(first)
        assert fuzz_cases.kind_of(second) == kind
        assert fuzz_cases.run_case(first, kind) == fuzz_cases.run_case(second, kind)
        assert first.notes == second.notes


def test_garbage_is_both_refused_and_survived() -> None:
    outcomes = set()
    for number in range(60):
        case = fuzz_cases.Case(6, number, torch.device("cpu"))
        fuzz_cases.kind_of(case, ("garbage linear",))
        outcomes.add(fuzz_cases.run_case(case, "garbage linear"))
    assert outcomes == {"refused", "survived"}


class TestFuzzersFindWhatIsWrong:
    """Each check of the fuzzer is seen to fail."""

    def case(self, kind: str, number: int) -> fuzz_cases.Case:
        case = fuzz_cases.Case(9, number, torch.device("cpu"))
        fuzz_cases.kind_of(case, (kind,))
        return case

    def found(self, kind: str, cases: int = 60) -> list[BaseException]:
        errors = []
        for number in range(cases):
            try:
                fuzz_cases.run_case(self.case(kind, number), kind)
            except Exception as error:
                errors.append(error)
        return errors

    def test_a_wrong_value(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = fuzz_cases.functional.flce_outputs

        def wrong(*args: Any, **options: Any) -> Any:
            outputs = right(*args, **options)
            return (outputs[0] * 1.01, *outputs[1:])

        monkeypatch.setattr(fuzz_cases.functional, "flce_outputs", wrong)
        assert len(self.found("linear", 20)) > 5

    def test_a_bad_target_that_goes_unseen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = fuzz_garbage.syncfree_ext.linear_cross_entropy

        def wrong(x: torch.Tensor, w: torch.Tensor, target: Any, **options: Any) -> Any:
            if isinstance(target, torch.Tensor) and target.dtype == torch.int64:
                target = target.clamp(-100, len(w) - 1)
                target = torch.where(target == -1, 0, target)
            return right(x, w, target, **options)

        monkeypatch.setattr(fuzz_garbage.syncfree_ext, "linear_cross_entropy", wrong)
        monkeypatch.setattr(fuzz_garbage, "SPOILS", (fuzz_garbage.spoil_target,))
        assert any("out of range was not refused" in str(error) for error in self.found("garbage linear"))

    def test_an_error_that_names_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(*args: Any, **options: Any) -> Any:
            raise ValueError("bad argument")

        monkeypatch.setattr(fuzz_garbage.syncfree_ext, "cross_entropy", wrong)
        assert any("does not say whose it is" in str(error) for error in self.found("garbage logits", 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("writable", [False, True])
def test_guards(dtype: torch.dtype, writable: bool, device: torch.device) -> None:
    """A copy has the values and strides of its original; a byte that changes around it, or in it, is seen."""
    wide = torch.ones(5, 9, dtype=dtype)
    for t in (wide, wide.T, wide[:, 1::2], wide[:1].expand(3, 9), wide[:0], wide[0, 0]):
        guards = Guards(device)
        held = guards.hold(t, "t", writable)
        assert torch.equal(held.cpu(), t)
        assert writable or held.stride() == t.stride()
        guards.check()
        if t.numel():
            held[(0,) * t.dim()] = 0
            if writable:
                guards.check()
            else:
                with pytest.raises(AssertionError, match="inside of t were written"):
                    guards.check()
    for side in (-1, 9):
        guards = Guards(device)
        held = guards.hold(torch.ones(9, dtype=dtype), "t", writable=True)
        torch.as_strided(held, (1,), (1,), held.storage_offset() + side).zero_()
        with pytest.raises(AssertionError, match="outside of t were written"):
            guards.check()


def test_ranks_that_are_threads() -> None:
    ranks = ThreadRanks(3)

    def job(rank: int) -> torch.Tensor:
        t = torch.tensor([float(rank)])
        ranks.all_reduce(t, ranks.ReduceOp.SUM)
        ranks.all_reduce(t, ranks.ReduceOp.MAX, async_op=True)
        return t

    assert [t.item() for t in ranks.run(job)] == [3.0] * 3

    def fails(rank: int) -> torch.Tensor:
        if rank == 1:
            raise ValueError("one rank alone")
        return job(rank)

    ranks = ThreadRanks(3)
    with pytest.raises(ValueError, match="one rank alone"):
        ranks.run(fails)


def test_the_fuzzer_as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process with the cases goes on after a crash, which is a finding."""
    fuzz = tool("fuzz")
    from typer.testing import CliRunner

    app = fuzz.typer.Typer()
    app.command()(fuzz.main)
    out = tmp_path / "out.json"
    # The cases run in another process, which crashes in one of them.
    program = tmp_path / "fuzz_that_crashes.py"
    program.write_text(
        "import os, runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "import fuzz_cases\n"
        "right = fuzz_cases.run_case\n"
        "def crash(case, kind):\n"
        "    if case.number == 3:\n"
        "        print('runtime error: as planned', file=sys.stderr, flush=True)\n"
        "        os.abort()\n"
        "    return right(case, kind)\n"
        "fuzz_cases.run_case = crash\n"
        f"sys.argv[0] = {fuzz.__file__!r}\n"
        f"runpy.run_path({fuzz.__file__!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(fuzz, "__file__", str(program))
    result = CliRunner().invoke(app, ["--cases", "6", "--seed", "4", "--only", "count,scale", "--out", str(out)])
    assert result.exit_code == 1, result.output
    numbers = json.loads(out.read_text())
    assert numbers["cases"] == 6
    assert [finding["case"] for finding in numbers["findings"]] == ["4:3"]
    assert "status -6" in numbers["findings"][0]["report"]
    assert "as planned" in numbers["findings"][0]["report"]


# ----------------------------------------------------------------------------------------------------------------- soak


def test_threads_at_once(device: torch.device) -> None:
    numbers = soak_parts.threads(device, 1.0, seed=int(os.environ["SYNCFREE_SEED"]) % 1000)
    assert numbers["calls"] >= 8


def test_threads_that_disturb_each_other_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = soak_parts.Problem.run
    calls = itertools.count()

    def wrong(self: soak_parts.Problem) -> list[torch.Tensor]:
        results = right(self)
        if next(calls) == 17:
            results[2].view(-1)[0] += 1
        return results

    monkeypatch.setattr(soak_parts.Problem, "run", wrong)
    with pytest.raises(AssertionError, match=r"thread \d, call \d+, output 2"):
        soak_parts.threads(torch.device("cpu"), 1.5)


def test_two_models_at_once(device: torch.device) -> None:
    soak_parts.two_models(device, 6)


def test_children(device: torch.device) -> None:
    assert soak_parts.processes(device, 1) == {"fork": 1, "spawn": 1}


def test_a_child_that_fails_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_parts, "_child", lambda *_: sys.exit(3))
    with pytest.raises(AssertionError, match="a child by fork ended with 3 and gave nothing"):
        soak_parts.processes(torch.device("cpu"), 1)


@pytest.mark.parametrize("name", ["scalars pending", "a thread that outlives the main one"])
def test_exit_with_work_in_flight(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_parts, "EXITS", {name: soak_parts.EXITS[name]})
    soak_parts.exits(device, 1)


def test_an_exit_that_complains_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_parts, "_PRELUDE", "import sys\n")
    monkeypatch.setattr(soak_parts, "EXITS", {"bad": "sys.stderr.write('lost')"})
    with pytest.raises(AssertionError, match="bad:\nlost"):
        soak_parts.exits(torch.device("cpu"), 1)
    monkeypatch.setattr(soak_parts, "EXITS", {"bad": "sys.exit(3)"})
    with pytest.raises(AssertionError, match="status 3"):
        soak_parts.exits(torch.device("cpu"), 1)


def test_no_leaks(device: torch.device) -> None:
    soak_parts.leaks(device, 32, looks=4)


def calls_of_every_op() -> dict[str, Callable[[], Any]]:
    """A small call of each, on the CPU."""
    ops = torch.ops.syncfree
    x, w, target = torch.randn(6, 8), torch.randn(9, 8), torch.randint(0, 8, (6,))
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    one, slots, mask = torch.ones(()), torch.zeros(2, 8, dtype=torch.int64), torch.ones(3, 9, dtype=torch.bool)

    def loss(reduction: Any) -> None:
        out = syncfree_ext.linear_cross_entropy(*leaves, target, reduction=reduction, weight=torch.ones(9))
        torch.autograd.grad(out.sum(), leaves)

    def logits() -> None:
        torch.autograd.grad(syncfree_ext.cross_entropy(leaves[0], target, num_items=3), leaves[0])

    def refused() -> None:
        with contextlib.suppress(REFUSED):
            ops.count_targets(target, 9, reduction="neither")

    def shard() -> None:
        counts, rows = ops.count_targets(target, 9)
        ops.flce_shard_logits(
            x, w, target, counts, rows, first_class=0, num_classes=9, first_row=0, chunk_rows=6, reduction="sum"
        )

    return {
        "mean": lambda: loss("mean"),
        "none": lambda: loss("none"),
        "logits": logits,
        "count": lambda: ops.count_targets(target, 9),
        "refused": refused,
        "shard": shard,
        "scale": lambda: ops.scale_unless_one_([one], one, [torch.empty(0)]),
        "publish": lambda: ops.publish_(slots, [one], [0, 1], [2.0], first_integer_column=4, ticket=1),
        "read": lambda: ops.read_slot(slots, 1),
        "select": lambda: syncfree_ext.masked_indices(mask, 4, order="random", seed=3),
    }


@pytest.mark.parametrize("name", sorted(calls_of_every_op()))
def test_a_call_keeps_no_byte(name: str) -> None:
    if not soak_parts._heap_bytes():
        pytest.skip("this C library does not count")
    call = calls_of_every_op()[name]
    looks = []
    for _ in range(5):
        for _ in range(200):
            call()
        gc.collect()
        looks.append(soak_parts._heap_bytes())
    grown = [b - a for a, b in itertools.pairwise(looks)]
    assert min(grown) < 200, f"{name}: the heap grew by {grown} bytes, each over 200 calls"


@pytest.mark.parametrize("what", ["files", "Python objects", "heap bytes"])
def test_leaks_are_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def leaking(_device: torch.device, _r: Any) -> None:
        kept.append(
            {
                "files": lambda: os.open("/proc/self/stat", os.O_RDONLY),
                "Python objects": lambda: [[] for _ in range(20)],
                "heap bytes": lambda: torch.ones(10_000),
            }[what]()
        )

    monkeypatch.setattr(soak_parts, "_everything", leaking)
    monkeypatch.setattr(soak_parts, "_torch_alone", lambda *_: None)
    if what == "heap bytes" and not soak_parts._heap_bytes():
        pytest.skip("this C library does not count")
    with pytest.raises(AssertionError, match=f"{what} grew by"):
        soak_parts.leaks(torch.device("cpu"), 90)
    for each in kept:
        if what == "files":
            os.close(each)


# ------------------------------------------------------------------------------------------------------------- sanitize

MEMCHECK = """\
========= COMPUTE-SANITIZER
....                                                                     [100%]
========= Invalid __global__ write of size 4 bytes
=========     at void syncfree::<unnamed>::gather_kernel<float>(syncfree::GatherParams)+0x2f0 in row_moves.cu:40
=========     by thread (31,0,0) in block (2,0,0)
=========     Access at 0x7f0 is out of bounds
========= Invalid __global__ read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<4>(int)+0x100
=========     by thread (0,0,0) in block (0,0,0)
========= ERROR SUMMARY: {total} errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at syncfree::<unnamed>::count_kernel(syncfree::CountParams)+0x90
=========     and Read access at syncfree::<unnamed>::count_kernel(syncfree::CountParams)+0xd0 [16 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


INITCHECK = """\
========= Uninitialized __global__ memory read of size 16 bytes
=========     at void syncfree::<unnamed>::{kernel}<__nv_bfloat16>(syncfree::Params)+0x230
=========     by thread (0,0,0) in block (175,0,0)
=========     Address 0x7fa8b09074e0
========= ERROR SUMMARY: 1 error
"""
PROBE = """\
========= COMPUTE-SANITIZER
seed 1
========= Uninitialized __global__ memory read of size 2 bytes
=========     at <unnamed>::read_box_kernel(const __nv_bfloat16 *, float *)+0x90
=========     by thread (0,0,0) in block (0,0,0)
all checks passed
========= ERROR SUMMARY: 4096 errors
"""


def test_reports_of_compute_sanitizer() -> None:
    summary = tool("sanitize_summary")
    part = summary.judge("memcheck-plain", 0, 3, MEMCHECK.format(total=2))
    assert (part.ours, part.other, part.unknown, part.verdict) == (1, 1, 0, "FOUND")
    assert "gather_kernel" in part.first[0]
    assert summary.judge("memcheck-plain", 0, 3, MEMCHECK.format(total=7)).unknown == 5
    only_other = MEMCHECK.replace("syncfree::", "torch::").format(total=2)
    assert summary.judge("initcheck-plain", 0, 3, only_other).verdict == "ok"
    assert summary.judge("initcheck-plain", 1, 3, only_other).verdict == "FAILED"
    assert summary.judge("initcheck-plain", 124, 3, "").verdict == "TIMEOUT"
    assert summary.judge("racecheck-plain", 0, 3, RACECHECK).ours == 1
    # Behind what pytest says of its progress.
    part = summary.judge("initcheck-plain", 0, 3, "..s." + INITCHECK.format(kernel="scale_kernel"), no_stores=True)
    assert (part.ours, part.stored, part.unknown, part.verdict) == (0, 1, 0, "ok")
    behind = MEMCHECK.format(total=2).replace("========= Invalid", ".x========= Invalid")
    part = summary.judge("memcheck-plain", 0, 3, behind)
    assert (part.ours, part.other, part.unknown) == (1, 1, 0)
    clean = "========= COMPUTE-SANITIZER\nall checks passed\n========= ERROR SUMMARY: 0 errors\n"
    assert summary.judge("memcheck-kernels", 0, 3, clean).verdict == "ok"
    assert summary.judge("memcheck-kernels", 0, 3, "no device\n").verdict == "FAILED", "the tool did not run"


def sanitize(folder: Path, middle: str, *parts: str) -> subprocess.CompletedProcess[str]:
    """tools/sanitize.sh with a compute-sanitizer that does only what is in the middle."""
    fake = folder / "compute-sanitizer"
    start, end = "echo ========= COMPUTE-SANITIZER", "echo ========= ERROR SUMMARY: 0 errors"
    fake.write_text(f"#!/bin/bash\n{start}\n{middle}\n{end}\n")
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(folder / "out")}
    environment.update(KERNEL_CHECKS="/bin/true", PYTHON=sys.executable, CUDA_HOME=str(folder), JOBS="1")
    command = [ROOT / "tools" / "sanitize.sh", *parts]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("crashes", "verdict"), [(1, "ok"), (2, "FAILED")])
def test_a_sanitizer_that_crashes_by_itself(tmp_path: Path, crashes: int, verdict: str) -> None:
    """Once is forgiven, if the program had not begun."""
    calls = f"echo x >> {tmp_path}/calls; (( $(wc -l < {tmp_path}/calls) > {crashes} )) || kill -SEGV $$"
    ended = sanitize(tmp_path, calls, "memcheck-kernels")
    assert ended.stdout.split()[-1] == verdict, ended.stdout + ended.stderr
    assert ended.returncode == (verdict != "ok")
    assert (tmp_path / "calls").read_text() == "x\n" * 2


def test_pieces_of_a_part_of_the_sanitizers(tmp_path: Path) -> None:
    """A long part runs in pieces, each by its name; together they are the part."""
    listed = sanitize(tmp_path, "", "list").stdout.split()
    assert len(set(listed)) == len(listed)
    pieces = [name for name in listed if name.startswith("racecheck-plain")]
    assert len(pieces) > 1
    note = f'echo "$2-$SYNCFREE_PIECE-${{@: -1}}" >> {tmp_path}/calls'  # $2: behind --tool
    ended = sanitize(tmp_path, note, "racecheck-plain", "memcheck-kernels", "memcheck-logits.2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    table = [line.split()[0] for line in ended.stdout.splitlines()[1:]]
    assert table == [*pieces, "memcheck-kernels", "memcheck-logits.2"]
    n = len(pieces)
    assert (tmp_path / "calls").read_text().split() == [
        *(f"racecheck-{k}/{n}-tests/test_edges_plain.py" for k in range(1, n + 1)),
        "memcheck--publish",
        f"memcheck-2/{sum(name.startswith('memcheck-logits') for name in listed)}-tests/test_shard_ops.py",
    ]
    for unknown in ("racecheck-plain.9", "racecheck-", "memcheck-kernels.1", "plain"):
        refused = sanitize(tmp_path, "", unknown)
        assert refused.returncode == 2
        assert f"got {unknown}" in refused.stderr


def test_pieces_of_the_tests() -> None:
    """SYNCFREE_PIECE divides what -k leaves, and nothing runs twice or not at all."""

    def collected(piece: str | None) -> list[str]:
        environment = {name: value for name, value in os.environ.items() if name != "SYNCFREE_PIECE"}
        environment.update({"SYNCFREE_PIECE": piece} if piece else {})
        command = [sys.executable, "-m", "pytest", "-q", "--co", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += ["-k", "target", "tests/test_errors.py"]
        ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        if ended.returncode:
            return [ended.stderr.strip()]
        return [line for line in ended.stdout.splitlines() if "::" in line]

    all_of_them = collected(None)
    first, second = collected("1/2"), collected("2/2")
    assert abs(len(first) - len(second)) <= 1
    assert sorted(first + second) == sorted(all_of_them)
    for wrong in ("3/2", "one"):
        assert collected(wrong) == [f"ERROR: SYNCFREE_PIECE must be K/N with 1 <= K <= N, got {wrong}"]


def test_the_table_of_compute_sanitizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = tool("sanitize_summary")
    for name, text in (("memcheck-plain", MEMCHECK.format(total=2)), ("racecheck-plain", RACECHECK)):
        (tmp_path / f"{name}.log").write_text(text)
        (tmp_path / f"{name}.status").write_text("0 12\n")
    assert summary.main(str(tmp_path), ["memcheck-plain", "racecheck-plain"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        "racecheck-plain",
        "12",
        "1",
        "0",
        "0",
        "0",
        "0",
        "FOUND",
    ]
    assert [part["verdict"] for part in json.loads((tmp_path / "summary.json").read_text())] == ["FOUND", "FOUND"]


@pytest.mark.parametrize(
    ("probe", "part", "kernel", "verdict"),
    [
        (PROBE, "initcheck-plain", "fused_targets_kernel", "ok"),
        (PROBE, "initcheck-plain", "scale_kernel", "ok"),
        (PROBE, "initcheck-options.2", "scale_kernel", "ok"),
        (PROBE, "initcheck-fuzz", "add_targets_kernel", "ok"),
        (PROBE, "initcheck-fuzz", "cast_rows_kernel", "ok"),
        (PROBE, "initcheck-plain", "fused_gather_kernel", "FOUND"),  # reads what other kernels have written
        (PROBE, "initcheck-plain", "prescale_kernel", "FOUND"),
        (PROBE, "initcheck-kernels", "scale_kernel", "FOUND"),  # there are no products
        (PROBE, "initcheck-count", "scale_kernel", "FOUND"),
        # The store itself has not happened.
        (PROBE.replace("all checks", "FAILED stores: element 64 is 0"), "initcheck-plain", "scale_kernel", "FOUND"),
        (PROBE.partition("all checks")[0], "initcheck-plain", "scale_kernel", "FOUND"),
        (PROBE, "memcheck-plain", "fused_targets_kernel", "FOUND"),
        (
            PROBE.replace("read_box", "other"),
            "initcheck-plain",
            "fused_targets_kernel",
            "FOUND",
        ),  # the tool sees stores
        (None, "initcheck-plain", "fused_targets_kernel", "FOUND"),  # the probe did not run
    ],
)
def test_reads_of_what_the_tool_does_not_see_written(
    tmp_path: Path, probe: str | None, part: str, kernel: str, verdict: str
) -> None:
    summary = tool("sanitize_summary")
    (tmp_path / f"{part}.log").write_text(INITCHECK.format(kernel=kernel))
    (tmp_path / f"{part}.status").write_text("0 12\n")
    if probe is not None:
        (tmp_path / "stores.log").write_text(probe)
    summary.main(str(tmp_path), [part])
    (found,) = json.loads((tmp_path / "summary.json").read_text())
    assert found["verdict"] == verdict
    assert found["ours"] + found["stored"] == 1


def test_an_allocation_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text says what it was and holds the words that trainers look for; on CUDA it becomes torch's own error."""
    mask = torch.ones(1, 4, dtype=torch.bool)
    text = r"syncfree: an allocation of 9007199254740992 bytes failed, probably: host out of memory\."
    with pytest.raises(RuntimeError, match=text):
        syncfree_ext.masked_indices(mask, 2**50)

    class OnCuda(torch.Tensor):
        device = torch.device("cuda", 0)  # type: ignore[assignment]

    tensor = torch.zeros(1).as_subclass(OnCuda)
    failed = RuntimeError("syncfree: an allocation of 77 bytes failed, probably: CUDA out of memory.")
    asked: list[Any] = []
    monkeypatch.setattr(torch, "empty", lambda *args, **options: asked.append((args, options["device"])))
    stream = Mock()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    with pytest.raises(torch.OutOfMemoryError, match="77 bytes failed"):
        _dispatch.raise_out_of_memory(failed, [None, tensor])
    assert asked == [((77,), torch.device("cuda", 0))]
    _dispatch.raise_out_of_memory(failed, [torch.zeros(1)])
    _dispatch.raise_out_of_memory(RuntimeError("something else"), [tensor])
    assert len(asked) == 1
    # A device that has failed cannot allocate either, and must not be taken for a full one.
    stream.query.side_effect = RuntimeError("an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _dispatch.raise_out_of_memory(failed, [tensor])
    assert len(asked) == 1
