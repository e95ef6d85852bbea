"""no_sync and allow_sync, fed with torch's warning as C++ gives it: by warnings.warn, from the line that waits."""

from __future__ import annotations

import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from syncfree_ext.syncs import SyncError, SyncWarning, allow_sync, explicit, no_sync
from syncfree_ext.syncs.detector import _hook
from syncfree_ext.syncs.internals import SYNC_WARNING
from syncfree_ext.syncs.kinds import Counts, Hint, Kind

HERE = Path(__file__).name


def sync() -> None:
    """A library that waits: torch warns from C++, in the frame that called it."""
    warnings.warn(f"{SYNC_WARNING} (Triggered internally at x.cpp:1.)", stacklevel=1)


def test_error_names_the_line() -> None:
    with pytest.raises(SyncError, match=rf"{HERE}:{sync.__code__.co_firstlineno + 2}: a synchronizing"), no_sync():
        sync()


def test_nothing_is_raised_where_nothing_waits() -> None:
    with no_sync() as checked:
        warnings.warn("another warning", UserWarning, stacklevel=1) if False else None
    assert not checked.found


def test_warn_names_each_line_once_and_counts() -> None:
    with pytest.warns(SyncWarning) as caught, no_sync("warn") as checked:
        for _ in range(3):
            sync()
    assert [(Path(w.filename).name, w.lineno) for w in caught] == [(HERE, sync.__code__.co_firstlineno + 2)]
    assert list(checked.found.values()) == [3]


def test_allowed_is_counted_under_its_reason() -> None:
    @allow_sync("the log")
    def log() -> None:
        sync()

    with no_sync() as checked:
        log()
        with allow_sync("a checkpoint"):
            sync()
            sync()
    assert not checked.found
    assert sorted((reason, count) for (reason, _), count in checked.allowed.items()) == [
        ("a checkpoint", 2),
        ("the log", 1),
    ]


def test_a_reason_is_needed() -> None:
    for reason in ("", "  ", None):
        with pytest.raises(ValueError, match="reason must say why"), allow_sync(reason):  # type: ignore[arg-type]
            pass


def test_an_inner_no_sync_forbids_again() -> None:
    with no_sync(), allow_sync("outside"):
        sync()
        with pytest.raises(SyncError), no_sync():
            sync()
        sync()


def test_as_a_decorator_again_and_again() -> None:
    @no_sync()
    def body(waits: bool) -> int:
        if waits:
            sync()
        return 3

    assert body(False) == body(False) == 3
    for _ in range(2):
        with pytest.raises(SyncError):
            body(True)


def test_another_thread_may_wait() -> None:
    """Its context is its own, in both directions: it neither raises, nor does its allow_sync disarm this thread."""
    errors: list[BaseException] = []
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        try:
            with allow_sync("its own"):
                entered.set()
                leave.wait(10)
                sync()
            sync()
        except BaseException as error:
            errors.append(error)

    with no_sync() as checked:
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(10)
        with pytest.raises(SyncError):
            sync()
        leave.set()
        thread.join()
    assert errors == []
    assert sum(checked.found.values()) == 1


def test_other_warnings_pass() -> None:
    with pytest.warns(DeprecationWarning, match="old"), no_sync():
        warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_state_is_restored() -> None:
    before = warnings.showwarning, list(warnings.filters)
    with no_sync(), no_sync("warn"):
        pass
    with pytest.raises(SyncError), no_sync():
        sync()
    assert (warnings.showwarning, list(warnings.filters)) == before
    assert _hook._listeners == []


def test_explicit_waits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: called.append(1))
    with pytest.raises(SyncError, match=rf"{HERE}:\d+: torch.cuda.synchronize"), no_sync():
        torch.cuda.synchronize()
    assert called == []  # it is raised before the wait
    with no_sync() as checked, allow_sync("timing"):
        torch.cuda.synchronize()
    assert (called, sum(checked.allowed.values())) == ([1], 1)


def test_work_wait_is_left_alone() -> None:
    """With NCCL the stream waits, not the host; DDP calls it in each step."""
    wait = explicit._wrapped(lambda: None, "Work.wait", Hint(Kind.COLLECTIVE, "", Counts.IF_SLOW))
    with no_sync() as checked:
        wait()
    assert not checked.found


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file where libraries are installed."""
    folder = tmp_path / "site-packages"
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    return folder / "lib.py"


def code_in(file: Path, text: str, **names: Any) -> dict[str, Any]:
    """What the text defines, as if it were in that file."""
    exec(compile(textwrap.dedent(text), str(file), "exec"), names)
    return names


def test_the_line_is_the_users(library: Path) -> None:
    """Not the library's between it and torch."""
    namespace = code_in(library, f"def go():\n    sync({SYNC_WARNING!r})\n", sync=warnings.warn)
    with no_sync("warn") as checked, warnings.catch_warnings(record=True):
        line = sys._getframe().f_lineno + 1
        namespace["go"]()
    # catch_warnings replaced the hook: what is silenced on purpose is not found.
    assert not checked.found
    with pytest.warns(SyncWarning), no_sync("warn") as checked:
        line = sys._getframe().f_lineno + 1
        namespace["go"]()
    assert [(Path(found.file).name, found.line) for found in checked.found] == [(HERE, line)]


@pytest.fixture
def waits_in_backward() -> Callable[[Tensor], Tensor]:
    """An op whose backward waits in torch's own code: between the engine and the wait there is no other frame."""
    text = f"""
    class Waits(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            warn({SYNC_WARNING!r})
            return grad * 2
    """
    function = torch.autograd.Function
    names = code_in(Path(torch.__file__).parent / "waits.py", text, warn=warnings.warn, Function=function, __name__="w")
    return names["Waits"].apply  # type: ignore[no-any-return]


def test_in_backward_the_line_is_that_of_the_call(library: Path, waits_in_backward: Callable[[Tensor], Tensor]) -> None:
    """The user's, although torch's lines, and a library's, lie in between."""
    accelerate = code_in(library, "def backward(loss):\n    loss.backward()\n")["backward"]
    x = torch.ones(2, requires_grad=True)
    calls = (
        lambda y: y.backward(),
        lambda y: torch.autograd.grad(y, x),
        lambda y: torch.autograd.backward([y]),
        lambda y: accelerate(y),
    )
    for call in calls:
        y = waits_in_backward(x).sum()
        where = rf"{HERE}:{call.__code__.co_firstlineno}: a synchronizing operation in backward\."
        with pytest.raises(SyncError, match=where), no_sync():
            call(y)


def test_a_hook_has_a_line_of_its_own(library: Path) -> None:
    def hook(grad: Tensor) -> None:
        sync()

    of_library = code_in(library, f"def hook(grad):\n    warn({SYNC_WARNING!r})\n", warn=warnings.warn)["hook"]
    for function, where in (
        (hook, rf"{HERE}:{sync.__code__.co_firstlineno + 2}: a synchronizing operation\."),
        (of_library, r"lib\.py:2: a synchronizing operation in backward\."),
    ):
        x = torch.ones(2, requires_grad=True)
        x.register_hook(function)
        with pytest.raises(SyncError, match=where), no_sync():
            (x * 2).sum().backward()


def test_bad_action() -> None:
    with pytest.raises(ValueError, match="action must be"), no_sync("raise"):  # type: ignore[arg-type]
        pass


@pytest.mark.cuda
def test_a_read_on_the_gpu() -> None:
    x = torch.ones(3, device="cuda")
    with no_sync():
        x = x * 2
    with pytest.raises(SyncError, match=rf"{HERE}:"), no_sync():
        x.sum().item()
    with no_sync() as checked, allow_sync("the test"):
        x.sum().item()
    assert sum(checked.allowed.values()) == 1
    assert torch.cuda.get_sync_debug_mode() == 0
    x.sum().item()


@pytest.mark.cuda
def test_backward_on_the_gpu() -> None:
    """torch gives the warning of a C++ node when backward ends: the line is that of the call."""
    x = torch.arange(6.0, device="cuda", requires_grad=True)
    y = x[torch.arange(6, device="cuda") % 2 == 0].sum()
    line = sys._getframe().f_lineno + 2
    with pytest.raises(SyncError, match=rf"{HERE}:{line}: .*in backward"), no_sync():
        y.backward()
