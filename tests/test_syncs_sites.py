"""Whose a line is: the user's, a library's or torch's, wherever each of them lies."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from syncfree_ext.syncs import sites

Load = Callable[..., ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """The module as it is when torch lies in a folder, with further folders on sys.path."""

    def load(torch_folder: str | Path, *path: str | Path) -> ModuleType:
        monkeypatch.setattr(torch, "__file__", str(Path(torch_folder) / "__init__.py"))
        monkeypatch.setattr(sys, "path", [*sys.path, *map(str, path)])
        spec = importlib.util.spec_from_file_location("sites_elsewhere", sites.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look it up
        spec.loader.exec_module(module)
        return module

    return load


TORCHES = [
    "/opt/torch/.venv/lib/python3.12/site-packages/torch",  # in another environment
    "/home/me/pytorch/torch",  # a checkout
    "/usr/lib/python3/dist-packages/torch",
    "/srv/site-packages/shared/torch",
]


@pytest.mark.parametrize("folder", TORCHES)
def test_torch_is_where_it_was_imported_from(load: Load, folder: str) -> None:
    there = load(folder)
    frames = there.Frames()
    assert frames.class_of_file(f"{folder}/autograd/graph.py") == sites.TORCH
    assert frames.class_of_file(f"{folder}/_dynamo/eval_frame.py") == sites.STDLIB
    # What only has its name is somebody's.
    assert frames.class_of_file("/home/me/torch/train.py") == sites.USER
    assert frames.class_of_file(f"{folder}_utils/train.py") != sites.TORCH
    for other in TORCHES:
        if other != folder:
            assert frames.class_of_file(f"{other}/autograd/graph.py") != sites.TORCH


def test_the_engine_is_that_of_this_torch() -> None:
    """Each frame between a user's backward and the wait is torch's, in the torch at hand."""
    seen: list[tuple[int, sites.Stack, sites.Stack]] = []
    frames = sites.Frames()

    def hook(grad: torch.Tensor) -> None:
        frame = sys._getframe(1)  # without the hook's own line
        seen.append((line, frames.capture(frame), frames.capture(frame, into_backward=True)))

    x = torch.ones(2, requires_grad=True)
    x.register_hook(hook)
    line = sys._getframe().f_lineno + 1
    (x * 2).sum().backward()
    ((line, inside, outside),) = seen
    assert (inside.user, inside.library, inside.engine) == (None, None, True)
    assert sites.resolve(inside.torch).file.endswith("torch/autograd/graph.py")  # type: ignore[union-attr]
    site = sites.resolve(outside.user)
    assert site is not None
    assert (Path(site.file).name, site.line, outside.engine) == (Path(__file__).name, line, False)


def test_libraries_are_where_packages_are_installed(load: Load) -> None:
    other = "/opt/other/lib/python3.12/site-packages"
    frames = load("/home/me/pytorch/torch", other, "/usr/lib/python3/dist-packages/").Frames()
    for folder in (sysconfig.get_path("purelib"), other, "/usr/lib/python3/dist-packages"):
        assert frames.class_of_file(f"{folder}/transformers/trainer.py") == sites.LIBRARY
    for file in (
        "/home/me/transformers/run.py",  # a folder that is named like a library
        "/home/me/site-packages/project/train.py",  # a project that lies in a folder of that name
        "/opt/unused/lib/python3.9/site-packages/project/train.py",
        f"{other}-old/project/train.py",
        "/home/me/pytorch/train.py",  # beside a checkout of torch
    ):
        assert frames.class_of_file(file) == sites.USER


def test_this_package_is_no_code_of_the_user(load: Load) -> None:
    """Wherever it lies: here, in a checkout. Its own finder is not even a library."""
    package = Path(sites.__file__).parents[1]
    frames = load("/home/me/pytorch/torch").Frames()
    assert frames.class_of_file(str(package / "integrations" / "transformers.py")) == sites.LIBRARY
    assert frames.class_of_file(str(package / "syncs" / "timer.py")) == sites.OURS
    # Beside it lies what its folder says: a user's code in a checkout, libraries where it is installed.
    beside = frames.class_of_file(str(package.parent / "project" / "train.py"))
    assert frames.class_of_file(f"{package}_user/train.py") == beside
    assert beside == (sites.LIBRARY if package.parent.name == "site-packages" else sites.USER)


def test_a_folder_that_joins_the_path_later_counts(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = load("/home/me/pytorch/torch").Frames()
    assert frames.class_of_file("/late/site-packages/a.py") == sites.USER
    monkeypatch.setattr(sys, "path", [*sys.path, "/late/site-packages"])
    assert frames.class_of_file("/late/site-packages/b.py") == sites.LIBRARY


def test_a_project_with_its_environment_inside(load: Load, tmp_path: Path) -> None:
    """And installed editable: the environment holds a pointer and the project the code."""
    packages = tmp_path / ".venv" / "lib" / "python3.12" / "site-packages"
    (packages / "project-1.0.dist-info").mkdir(parents=True)
    (packages / "__editable__.project-1.0.pth").write_text(f"{tmp_path / 'src'}\n", encoding="utf-8")
    frames = load(packages / "torch", packages, tmp_path / "src").Frames()
    assert frames.class_of_file(str(tmp_path / "src" / "project" / "train.py")) == sites.USER
    assert frames.class_of_file(str(tmp_path / "train.py")) == sites.USER
    assert frames.class_of_file(str(packages / "accelerate" / "accelerator.py")) == sites.LIBRARY
    assert frames.class_of_file(str(packages / "torch" / "_tensor.py")) == sites.TORCH


def test_a_folder_that_pip_installed_torch_into(load: Load, tmp_path: Path) -> None:
    """`pip install --target`: its neighbours are libraries, too."""
    (tmp_path / "torch-2.11.0.dist-info").mkdir()
    frames = load(tmp_path / "torch", tmp_path).Frames()
    assert frames.class_of_file(str(tmp_path / "transformers" / "trainer.py")) == sites.LIBRARY
    assert frames.class_of_file(str(tmp_path / "torch" / "_tensor.py")) == sites.TORCH


def test_the_users_own_folders_come_first(load: Load) -> None:
    """Wherever they lie: user= is for code that is installed, and for work on torch itself."""
    there = load("/home/me/pytorch/torch", "/venv/site-packages")
    frames = there.Frames(["/venv/site-packages/mine", "/home/me/pytorch/torch/nn/new.py"])
    assert frames.class_of_file("/venv/site-packages/mine/a.py") == sites.USER
    assert frames.class_of_file("/home/me/pytorch/torch/nn/new.py") == sites.USER
    assert frames.class_of_file("/venv/site-packages/mine_not/a.py") == sites.LIBRARY


def test_this_package_and_nobodys_code() -> None:
    frames = sites.Frames()
    assert {frames.class_of(f.__code__) for f in (sites.resolve, sites.Frames.capture)} == {sites.OURS}
    for function in (os.path.join, Path.cwd.__func__):  # type: ignore[attr-defined]
        assert frames.class_of(function.__code__) == sites.STDLIB
    assert frames.class_of_file("<string>") == sites.STDLIB
    assert frames.class_of_file("<ipython-input-1-2>") == sites.USER


def test_paths_as_a_person_reads_them(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "site-packages" / "project"
    project.mkdir(parents=True)
    monkeypatch.chdir(project)
    there = load("/home/me/pytorch/torch", "/venv/site-packages")
    assert there.short_path("/venv/site-packages/lib/a.py") == "lib/a.py"
    assert there.short_path(str(project / "train.py")) == "train.py"
    assert there.short_path("/elsewhere/site-packages/train.py") == "/elsewhere/site-packages/train.py"
