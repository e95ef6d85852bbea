"""What a release rests on and no other test sees: the check of the wheel's contents, versions, and the workflows."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import check_wheel

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FILES = {"__init__.py", "py.typed", "part/__init__.py", "part/page.html"}
LIBRARIES = {"_C.abi3.so", "_C_cuda.abi3.so"}

MakeWheel = Callable[[set[str]], Path]


@pytest.fixture
def make_wheel(tmp_path: Path) -> MakeWheel:
    """Makes a checkout with the files of FILES, and a wheel with those that it is called with."""
    for name in FILES | {"__pycache__/__init__.pyc", "_C.abi3.so"}:
        path = tmp_path / "syncfree_ext" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def make(names: set[str]) -> Path:
        wheel = tmp_path / "syncfree_ext-1.0-cp310-abi3-linux_x86_64.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("syncfree_ext-1.0.dist-info/METADATA", "")
            for name in sorted(names):
                archive.writestr(f"syncfree_ext/{name}", "")
        return wheel

    return make


@pytest.mark.parametrize("libraries", [LIBRARIES, {"_C.abi3.so"}], ids=["cuda", "cpu"])
def test_a_whole_wheel_passes(make_wheel: MakeWheel, tmp_path: Path, libraries: set[str]) -> None:
    check_wheel.check_contents(make_wheel(FILES | libraries), tmp_path)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        *((FILES - {name} | LIBRARIES, f"lacks syncfree_ext/{name}") for name in sorted(FILES)),
        (FILES | LIBRARIES | {"removed.py"}, "holds syncfree_ext/removed.py"),
        (FILES | {"_C_cuda.abi3.so"}, "no syncfree_ext/_C.abi3.so"),
        (FILES | LIBRARIES | {"_native.cpython-311-x86_64-linux-gnu.so"}, "holds syncfree_ext/_native"),
    ],
)
def test_a_wheel_with_other_files_fails(make_wheel: MakeWheel, tmp_path: Path, names: set[str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        check_wheel.check_contents(make_wheel(names), tmp_path)


def test_the_tests_of_an_installed_wheel_are_there() -> None:
    """pytest would stop at a missing file; a renamed test in a file that is there is seen here too."""
    for test in check_wheel.TESTS:
        name, _, function = test.partition("::")
        text = (ROOT / "tests" / name).read_text(encoding="utf-8")
        assert not function or f"def {function}(" in text, test


def test_one_version_everywhere() -> None:
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    assert f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version[1]} (" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_commits(workflow: Path) -> None:
    """A tag can be moved to other code, which would then run with the rights of a release."""
    used = re.findall(r"uses: *(\S+)", workflow.read_text(encoding="utf-8"))
    assert used
    assert [name for name in used if not re.fullmatch(r"\./\S+|[\w/-]+@[0-9a-f]{40}", name)] == []


def test_only_a_tag_publishes() -> None:
    publishing = [path for path in WORKFLOWS if "pypi-publish" in path.read_text(encoding="utf-8")]
    assert [path.name for path in publishing] == ["release.yml"]
    text = publishing[0].read_text(encoding="utf-8")
    triggers = re.search(r"^on:\n((?:  .*\n)+)", text, re.MULTILINE)
    assert triggers is not None
    assert triggers[1] == '  push:\n    tags: ["v*"]\n'
    # The right to publish belongs to one job, and not to the workflow.
    assert re.findall(r"^( *)id-token: write", text, re.MULTILINE) == ["      "]
