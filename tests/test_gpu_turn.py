"""Tests that measure the GPU have it alone."""

from __future__ import annotations

import fcntl
import functools
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import conftest
from gpu_turn import locked, turn


def is_free(name: str, how: int, folder: Path) -> bool:
    try:
        with locked(name, how | fcntl.LOCK_NB, folder):
            return True
    except BlockingIOError:
        return False


def test_several_share_and_one_is_alone(tmp_path: Path) -> None:
    with turn(False, tmp_path), turn(False, tmp_path):
        assert is_free("gpu", fcntl.LOCK_SH, tmp_path)
        assert not is_free("gpu", fcntl.LOCK_EX, tmp_path)
    with turn(True, tmp_path):
        assert not is_free("gpu", fcntl.LOCK_SH, tmp_path)
    with pytest.raises(KeyError), turn(True, tmp_path):
        raise KeyError
    assert is_free("gpu", fcntl.LOCK_EX, tmp_path)


def test_who_waits_to_be_alone_is_next(tmp_path: Path) -> None:
    order = []

    def alone() -> None:
        with turn(True, tmp_path):
            order.append("alone")

    def another() -> None:
        with turn(False, tmp_path):
            order.append("another")

    with turn(False, tmp_path):
        first = threading.Thread(target=alone)
        first.start()
        while is_free("door", fcntl.LOCK_EX, tmp_path):
            time.sleep(0.001)
        second = threading.Thread(target=another)
        second.start()
    first.join()
    second.join()
    assert order == ["alone", "another"]


@pytest.mark.parametrize(
    ("marks", "shared", "exclusive"), [((), True, True), (("cuda",), True, False), (("cuda", "alone"), False, False)]
)
def test_which_tests_take_a_turn(
    marks: tuple[str, ...], shared: bool, exclusive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(conftest, "turn", functools.partial(turn, folder=tmp_path))
    item = SimpleNamespace(get_closest_marker=lambda name: name if name in marks else None)
    running = conftest.pytest_runtest_protocol(item)  # type: ignore[arg-type]
    next(running)
    assert is_free("gpu", fcntl.LOCK_SH, tmp_path) == shared
    assert is_free("gpu", fcntl.LOCK_EX, tmp_path) == exclusive
    with pytest.raises(StopIteration):
        running.send(None)
    assert is_free("gpu", fcntl.LOCK_EX, tmp_path)


def test_what_takes_long_comes_first_and_what_is_alone_last(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = {"a": (), "b": ("alone",), "c": ("slow",), "d": (), "e": ("alone", "slow"), "f": ("slow",)}
    tests["g"] = ("cuda", "waits_often")

    def item(marks: tuple[str, ...], name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, iter_markers=lambda: [SimpleNamespace(name=mark) for mark in marks])

    monkeypatch.delenv("SYNCFREE_PIECE", raising=False)
    for there, order in ((True, "cfgadeb"), (False, "abcdefg")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        items = [item(marks, name) for name, marks in tests.items()]
        conftest.pytest_collection_modifyitems(SimpleNamespace(), items)  # type: ignore[arg-type]
        assert "".join(i.name for i in items) == order


def test_what_measures_the_gpu_is_marked() -> None:
    """The sync finder's cases judge by time."""
    import test_syncs_cases

    for function in (test_syncs_cases.test_case, test_syncs_cases.test_no_row_in_200_steps):
        assert {"cuda", "alone"} <= {mark.name for mark in function.pytestmark}
