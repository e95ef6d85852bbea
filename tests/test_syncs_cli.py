"""The command line: scripts as they are, exit codes, several ranks, and the pytest plugin."""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs typer")
pytest.importorskip("rich", reason="the command line needs rich")

import syncfree_ext
from fake_gpu import fake_card
from syncfree_ext.syncs import Report, cli, find_syncs, runner, table
from syncfree_ext.syncs.__main__ import main
from syncs_samples import random_report

ROOT = Path(syncfree_ext.__file__).parent.parent

SCRIPT = """
import sys
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def log(loss):
    return loss.item()

for index in range(20):
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    log(loss)
print("the end", sys.argv[1:], __name__)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C is an exception, also where the tests run in the background, where a shell switches it off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A simulated GPU in the place of the real one."""
    with fake_card() as gpu:
        monkeypatch.setattr("syncfree_ext.syncs.session.current_gpu", lambda: gpu)
        yield


@pytest.fixture
def draw(rng: torch.Generator) -> random.Random:
    return random.Random(int(torch.randint(2**31, (), generator=rng)))


def status(*arguments: object) -> int:
    """How `syncfree ARGUMENTS` ends."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("card")
def test_a_script_as_it_is(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_path, html_path = tmp_path / "r.json", tmp_path / "r.html"
    assert (
        status("syncs", "--warmup", 2, "--steps", 3, "--json", json_path, "--html", html_path, script, "--lr", "1") == 0
    )
    out = capsys.readouterr().out
    assert "the end" not in out  # it is stopped when all is measured
    assert "train.py:9" in out
    assert "return loss.item()" in out
    report = Report.from_json(json_path.read_text(encoding="utf-8"))
    assert [(row.line, row.kind, row.calls) for row in report.rows] == [(9, "scalar read", 1.0)]
    assert report.steps == 3
    assert html_path.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.usefixtures("card")
def test_to_the_end_with_its_arguments(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.argv, list(sys.path)
    assert status("syncs", "--keep-going", script, "--steps", "2") == 0
    assert "the end ['--steps', '2'] __main__" in capsys.readouterr().out
    assert (sys.argv, sys.path) == before


@pytest.mark.usefixtures("card")
def test_a_module(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(script.parent)
    assert status("syncs", "-m", "train") == 0
    assert "train.py:9" in capsys.readouterr().out


@pytest.mark.usefixtures("card")
def test_fail_over_and_the_allow_file(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    allowed = tmp_path / "allow.txt"
    assert status("syncs", "--fail-over", 1, script) == 0
    assert status("syncs", "--fail-over", 0, script) == 3
    assert "waits 1 times a step where 0 are allowed" in capsys.readouterr().err
    allowed.write_text("train.py::log  # the log reads it\nother.py  # gone\n", encoding="utf-8")
    assert status("syncs", "--fail-over", 0, "--allow", allowed, script) == 0
    assert "entry 'other.py' matched nothing" in capsys.readouterr().err
    allowed.write_text("train.py::log\n", encoding="utf-8")
    assert status("syncs", "--fail-over", 0, "--allow", allowed, script) == 2


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('no')", 1),
        ("1 / 0", 1),
        ("def broken(", 1),
        ("raise SystemExit", 0),
    ],
)
def test_the_scripts_own_end(text: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.py"
    path.write_text(text, encoding="utf-8")
    assert status("syncs", path) == code
    assert "Nothing was measured" in capsys.readouterr().out
    # A check that knows nothing does not pass.
    assert status("syncs", "--fail-over", 5, path) == (code or 4)


@pytest.mark.usefixtures("card")
def test_reports_of_a_script_that_changes_its_folder(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    script.write_text(f"import os\nos.chdir({str(there)!r})\n{SCRIPT}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert status("syncs", "--json", "r.json", "--html", "r.html", script) == 0
    assert (tmp_path / "r.json").is_file()
    assert (tmp_path / "r.html").is_file()
    assert list(there.iterdir()) == []


def options_for_files() -> list[tuple[str, str]]:
    """Each command with each of its options that names a file to write."""
    found = []
    for command in cli.app.registered_commands:
        assert command.callback is not None
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            for option in getattr(hint, "__metadata__", ()):
                if "Path" in str(hint.__origin__) and not option.exists:
                    found.append((command.callback.__name__, (option.param_decls or (f"--{name}",))[0]))
    return found


def test_the_options_for_files_are_found() -> None:
    assert {("syncs", "--json"), ("syncs", "--html"), ("show", "--svg")} <= set(options_for_files())


@pytest.mark.parametrize(("command", "option"), options_for_files())
@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("none/r", "there is no folder 'none'"),
        ("file/r", "there is no folder 'file'"),
        ("folder", "'folder' is a directory"),
        ("locked/r", "the folder 'locked' is not writable"),
        ("locked/file", "'locked/file' is not writable"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_run(
    command: str,
    option: str,
    target: str,
    problem: str,
    draw: random.Random,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("folder", "locked"):
        Path(folder).mkdir()
    for file in ("file", "locked/file"):
        Path(file).touch()
    Path("train.py").write_text("open('started', 'w')", encoding="utf-8")
    random_report(draw).to_json("r.json")
    may = os.access

    def access(path: Any, mode: int, **options: Any) -> bool:
        """Root may write everywhere, so what is locked is only said to be."""
        return may(path, mode, **options) and not (mode & os.W_OK and "locked" in str(path))

    monkeypatch.setattr(os, "access", access)
    assert status(command, option, target, {"syncs": "train.py", "show": "r.json"}[command]) == 2
    ended = capsys.readouterr()
    assert f"Invalid value for '{option}'" in ended.err
    assert problem in ended.err
    assert ended.out == ""
    assert not Path("started").exists()


@pytest.mark.usefixtures("card")
def test_a_file_that_is_there_is_written_again(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.json").write_text("old", encoding="utf-8")
    assert status("syncs", "--json", "r.json", "--html", os.devnull, script) == 0
    assert Report.from_json(Path("r.json").read_text(encoding="utf-8")).steps == 5


INTERRUPTED = SCRIPT.replace("    log(loss)\n", "    log(loss)\n    if index == 6:\n        interrupt()\n")


@pytest.mark.usefixtures("card", "interrupts")
@pytest.mark.parametrize(
    ("interrupt", "options", "note"),
    [
        ("signal.raise_signal(signal.SIGINT)", [], "The block ended after 4 of 5 measured steps."),
        ("raise KeyboardInterrupt", [], "The block ended after 4 of 5 measured steps."),
        ("raise KeyboardInterrupt", ["--warmup", 9], "Nothing was measured: the block ended in step 8 of 9"),
        ("raise KeyboardInterrupt", ["--warmup", 1, "--steps", 4], ""),  # among the steps without the timer
        ("raise KeyboardInterrupt", ["--fail-over", 0], ""),  # not hidden by the check's own status
    ],
)
def test_an_interrupt_ends_the_script_with_a_report(
    interrupt: str, options: list[object], note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, path, page = tmp_path / "train.py", tmp_path / "r.json", tmp_path / "r.html"
    script.write_text(f"import signal\ndef interrupt():\n    {interrupt}\n{INTERRUPTED}", encoding="utf-8")
    assert status("syncs", *options, "--json", path, "--html", page, script) == 130
    ended = capsys.readouterr()
    assert "Traceback" in ended.err
    assert "the script ended with status 130" in ended.err
    report = Report.from_json(path.read_text(encoding="utf-8"))
    assert any(line.startswith(note) for line in report.notes) or not note
    assert [row.calls for row in report.rows] == ([] if not report.steps else [1.0])
    assert ("return loss.item()" in ended.out) == bool(report.steps)
    assert page.is_file()


@pytest.mark.usefixtures("card", "interrupts")
@pytest.mark.parametrize("place", ["the report is made", "the report is printed"])
def test_a_second_interrupt_ends_the_report(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reached = []

    def interrupted(*_: object) -> str:
        reached.append(place)
        signal.raise_signal(signal.SIGINT)
        return ""

    owner, name = {
        "the report is made": (find_syncs, "_finish"),
        "the report is printed": (table, "render"),
    }[place]
    monkeypatch.setattr(owner, name, interrupted)
    script, path = tmp_path / "train.py", tmp_path / "r.json"
    script.write_text(f"def interrupt():\n    raise KeyboardInterrupt\n{INTERRUPTED}", encoding="utf-8")
    before = sys.argv, list(sys.path), threading.excepthook
    assert status("syncs", "--json", path, script) in (1, 130)  # by the version of typer
    assert reached == [place]
    assert not path.exists()
    assert "of 5 measured steps" not in capsys.readouterr().out
    assert (sys.argv, sys.path, threading.excepthook) == before


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("end", ["", "1 / 0", "raise KeyboardInterrupt"])
def test_a_loop_in_a_thread_is_stopped_in_silence(
    end: str, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other errors of threads reach the hook that was there, however the script ends."""
    text = f"""
import threading

def train():
{textwrap.indent(SCRIPT, "    ")}

def broken():
    raise LookupError("mine")

for target in (train, broken):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
{end}
"""
    script.write_text(text, encoding="utf-8")
    seen: list[type[BaseException]] = []

    def hook(args: Any) -> None:
        seen.append(args.exc_type)

    monkeypatch.setattr(threading, "excepthook", hook)
    path = tmp_path / "r.json"
    assert status("syncs", "--json", path, script) == {"": 0, "1 / 0": 1}.get(end, 130)
    assert seen == [LookupError]
    assert threading.excepthook is hook
    assert not torch._C._only_lift_cpu_tensors()
    ended = capsys.readouterr()
    assert "_Stop" not in ended.err
    assert "the end" not in ended.out
    assert Report.from_json(path.read_text(encoding="utf-8")).steps == 5


def test_without_a_device_a_check_does_not_pass(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("syncfree_ext.syncs.session.current_gpu", lambda: None)
    assert status("syncs", script) == 0
    assert status("syncs", "--fail-over", 5, script) == 4
    assert "no CUDA device" in capsys.readouterr().err


def test_what_is_not_there(tmp_path: Path) -> None:
    assert status("syncs", tmp_path / "none.py") == 2
    assert status("show", tmp_path / "none.json") == 2
    (tmp_path / "bad.json").write_text("{}", encoding="utf-8")
    assert status("show", tmp_path / "bad.json") == 2
    assert status("syncs", "--steps", 0, tmp_path) == 2


def test_show_merges(draw: random.Random, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = random_report(draw)
    for rank in range(2):
        for row in report.rows:
            row.ranks = [rank]
        report.to_json(tmp_path / f"{rank}.json")
    merged, page, picture = tmp_path / "m.json", tmp_path / "m.html", tmp_path / "m.svg"
    files = [tmp_path / "0.json", tmp_path / "1.json"]
    assert status("show", *files, "--json", merged, "--html", page, "--svg", picture) == 0
    assert Report.from_json(merged.read_text(encoding="utf-8")).ranks == 2
    assert "<svg" in picture.read_text(encoding="utf-8")
    assert status("show", *files, "--fail-over", 0) == 3


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("info") == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert "_C.abi3.so" in out


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_packages_are_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.startswith(f"{missing}.") or name in ("syncfree_ext.syncs.cli", "syncfree_ext.syncs.table"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as ended:
        main(["info"])
    # A text as the code: Python prints it and ends with status 1.
    needs = f'syncfree: the command line needs {missing}, which is not installed: pip install "syncfree_ext[syncs]"'
    assert ended.value.code == needs


@pytest.mark.usefixtures("card")
def test_python_m(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m syncfree_ext.syncs` is `syncfree syncs`."""
    monkeypatch.setattr(sys, "argv", ["-", "--json", str(tmp_path / "r.json"), str(script)])
    monkeypatch.delitem(sys.modules, "syncfree_ext.syncs.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("syncfree_ext.syncs", run_name="__main__")
    assert not ended.value.code
    assert Report.from_json((tmp_path / "r.json").read_text(encoding="utf-8")).steps == 5


def test_under_torchrun(script: Path, tmp_path: Path) -> None:
    """In processes of their own, without a stand-in for the GPU: each rank is measured, and the first one merges."""
    merged = tmp_path / "r.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "syncfree_ext.syncs", "--json", str(merged), str(script)]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    report = Report.from_json(merged.read_text(encoding="utf-8"))
    assert (report.ranks, report.steps) == (2, 5)
    assert not list(tmp_path.glob("syncfree-syncs-*"))


def test_a_rank_that_never_comes_is_said(draw: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    report = random_report(draw)
    assert runner.gather(report, runner.Ranks(1, 1, 3, "run"), patience=0.0) is None
    merged = runner.gather(report, runner.Ranks(0, 0, 3, "run"), patience=0.0)
    assert merged is not None
    assert "Reports came from 2 of 3 ranks." in merged.notes
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert runner.Ranks.from_environment() is None
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    ranks = runner.Ranks.from_environment()
    assert ranks is not None
    assert (ranks.rank, ranks.local_rank, ranks.local_count) == (5, 1, 4)


def test_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The body is watched, fixtures are not; nothing breaks where there is no GPU; other tests are left alone."""
    text = """
        import warnings
        import pytest
        from syncfree_ext.syncs.internals import SYNC_WARNING

        def sync():
            warnings.warn(SYNC_WARNING, stacklevel=1)

        @pytest.fixture
        def slow_fixture(no_sync):
            sync()

        def test_waits(no_sync): sync()
        def test_allowed(no_sync):
            with no_sync.allow("meant"):
                sync()
            assert sum(no_sync.checked.allowed.values()) == 1
        def test_fixture(slow_fixture, no_sync): pass
        def test_without(): sync()
        """
    path = tmp_path / "test_with_the_plugin.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setitem(sys.modules, path.stem, None)  # so that it is taken away again
    monkeypatch.delitem(sys.modules, path.stem)
    plugin = "syncfree_ext.syncs.pytest_plugin"
    status = pytest.main(
        ["-q", "-s", "-p", "no:cacheprovider", "-p", plugin, "-c", str(tmp_path / "pytest.ini"), str(path)]
    )
    out = capsys.readouterr().out
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 3 passed" in out, out
    assert f"{path.name}:7: a synchronizing operation" in out


def test_report_is_valid_json(script: Path, tmp_path: Path, card: None) -> None:
    path = tmp_path / "r.json"
    status("syncs", "--json", path, script)
    assert json.loads(path.read_text(encoding="utf-8"))["format"] == "syncfree.syncs/1"
