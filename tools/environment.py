#!/usr/bin/env python3
"""Finds or makes the Python environment that a make target runs in, and prints its interpreter.

The rule, for the requirement files of a target (requirements/NAME.txt):

1. `.venv` is there: it is used, and what it lacks is installed into it, unless the Python at hand lacks nothing.
2. The Python at hand has everything, a torch of at least 2.11 included: it is used as it is, nothing is installed. This
   serves a machine that reaches no package index.
3. Otherwise `.venv` is made. It sees the packages of the Python at hand if that one has a torch of at least 2.11, which
   is kept; if not, the torch of requirements/torch.txt (or TORCH) is installed into it.

A requirement whose comment starts with `optional:` may stay missing where it cannot be installed; the comment is then
printed. Messages go to stderr and the path of the interpreter, alone, to stdout. Only the standard library is used.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIN_TORCH = (2, 11)
MIN_PYTHON = (3, 10)

# Run by the interpreter in question; importing torch itself would cost seconds.
PROBE = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Requirement:
    """One line of a requirements file: a name, `>=` or `==` a version, and why it may be missing."""

    name: str
    operator: str
    version: tuple[int, ...]
    text: str
    without: str | None

    def accepts(self, found: str | None) -> bool:
        """Whether a found version (None: not installed) satisfies this line."""
        if found is None:
            return False
        have = release(found)
        return have[: len(self.version)] == self.version if self.operator == "==" else have >= self.version


def release(version: str) -> tuple[int, ...]:
    """The numbers a version starts with: "2.13.0+cpu" gives (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def read_requirements(path: Path) -> list[Requirement]:
    """The requirements of a file, in order.

    Raises:
        ValueError: a line is neither empty, a comment, nor `name>=version` or `name==version`.
    """
    requirements = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text, _, comment = (part.strip() for part in line.partition("#"))
        if not text:
            continue
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)(>=|==)([0-9.]+)", text)
        if match is None:
            raise ValueError(f"{path}: expected name>=version or name==version, got {text!r}")
        without = comment.removeprefix("optional:").strip() if comment.startswith("optional:") else None
        requirements.append(Requirement(match[1], match[2], release(match[3]), text, without))
    return requirements


def say(message: str) -> None:
    """A message for the reader of the terminal; stdout carries the interpreter alone."""
    print(f"[environment] {message}", file=sys.stderr, flush=True)


def fail(message: str) -> None:
    """Ends the run with a message and status 1."""
    say(message)
    raise SystemExit(1)


def tool_version(name: str) -> str | None:
    """The version of an executable on the PATH that serves instead of the package of its name (cmake, ninja)."""
    if name not in {"cmake", "ninja"} or shutil.which(name) is None:
        return None
    output = subprocess.run([name, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"\d+(?:\.\d+)+", output)
    return match.group() if match else None


def missing_in(python: Path, requirements: list[Requirement]) -> list[Requirement]:
    """The requirements that an interpreter's environment does not satisfy."""
    names = [requirement.name for requirement in requirements]
    probe = subprocess.run([python, "-c", PROBE, *names], capture_output=True, text=True, check=False)
    if probe.returncode:
        return requirements
    found: dict[str, str] = json.loads(probe.stdout)
    return [r for r in requirements if not r.accepts(found.get(r.name)) and not r.accepts(tool_version(r.name))]


def pip_install(python: Path, arguments: Sequence[str]) -> bool:
    """Installs with the pip of an interpreter; few retries, so that a machine without an index is told soon."""
    options = ["--quiet", "--disable-pip-version-check", "--retries", "1"]
    command = [str(python), "-m", "pip", "install", *options, *arguments]
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode == 0


def make_venv(python: Path, venv: Path, sees_packages: bool) -> None:
    """A new environment, which sees the packages of `python` if those hold the torch to keep."""
    say(f"making {venv.name}" + (", which keeps the torch that is installed" if sees_packages else ""))
    if subprocess.run([python, "-m", "venv", venv], stdout=sys.stderr, check=False).returncode:
        shutil.rmtree(venv, ignore_errors=True)
        fail(f"{python} could not make a virtual environment; on Debian and Ubuntu install python3-venv")
    if sees_packages:
        # --system-site-packages would show the packages of the system alone, also where `python` is itself that of a
        # virtual environment. The folders come after the new environment's own, so what is installed there wins.
        folders = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
        (own,) = (venv / "lib").glob("python*/site-packages")
        lines = [f"import site; site.addsitedir({path!r})" for path in folders]
        (own / "packages_at_hand.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
        # Before 3.12 a new environment comes with an old setuptools, which would hide a newer one that is at hand.
        command = [str(venv / "bin" / "python"), "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"]
        subprocess.run(command, stdout=sys.stderr, check=False)


def complete(python: Path, requirements: list[Requirement], torch: str) -> None:
    """Installs what an environment lacks; stops with a plain message if something needed stays missing."""
    missing = missing_in(python, requirements)
    if any(requirement.name == "torch" for requirement in missing):
        say(f"installing {torch}")
        if not pip_install(python, torch.split()):
            fail(f"{torch} could not be installed; choose another one with TORCH=...")
        missing = [requirement for requirement in missing if requirement.name != "torch"]
    if missing:
        say("installing " + ", ".join(requirement.text for requirement in missing))
        # --upgrade-strategy keeps torch and everything else that is already good enough.
        arguments = ["--upgrade", "--upgrade-strategy", "only-if-needed", *(r.text for r in missing)]
        if not pip_install(python, arguments):
            # One package that cannot be had must not cost the others.
            for requirement in missing:
                pip_install(python, [requirement.text])
    report(missing_in(python, requirements), python)


def report(missing: list[Requirement], python: Path) -> None:
    """Says what stays missing; status 1 if something of it is needed."""
    for requirement in missing:
        if requirement.without is not None:
            say(f"{requirement.name} is not installed: {requirement.without}")
    needed = [requirement.text for requirement in missing if requirement.without is None]
    if needed:
        fail(f"{python} lacks {', '.join(needed)}, and installing failed (see above)")


def needed_only(requirements: list[Requirement]) -> list[Requirement]:
    """The requirements that may not stay missing."""
    return [requirement for requirement in requirements if requirement.without is None]


def choose(names: list[str], base: Path, venv: Path, torch: str) -> Path:
    """The interpreter to run with, its environment completed.

    Args:
        names: requirement files, without folder and suffix.
        base: the interpreter at hand.
        venv: where the environment is or will be.
        torch: what to ask pip for where no torch of at least 2.11 is found.
    """
    requirements = [Requirement("torch", ">=", MIN_TORCH, "torch>=" + ".".join(map(str, MIN_TORCH)), None)]
    for name in names:
        requirements += read_requirements(ROOT / "requirements" / f"{name}.txt")
    inside = venv / "bin" / "python"
    if inside.exists():
        if missing_in(inside, requirements) and not missing_in(base, requirements):
            return base
    else:
        missing = missing_in(base, requirements)
        if not missing:
            return base
        make_venv(base, venv, sees_packages=all(requirement.name != "torch" for requirement in missing))
        if not needed_only(missing) and not pip_install(inside, [r.text for r in missing]):
            # Nothing but comforts is missing and none can be had: the Python at hand does.
            shutil.rmtree(venv)
            report(missing, base)
            return base
    complete(inside, requirements, torch)
    return inside


def main() -> None:
    """Command line: `environment.py build test` prints the interpreter that has both."""
    parser = argparse.ArgumentParser(description="Finds or makes the Python environment of a make target.")
    parser.add_argument("names", nargs="+", help="requirement files in requirements/, without suffix")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment to use or make")
    parser.add_argument("--torch", default="", help="what to install where no torch >= 2.11 is found")
    options = parser.parse_args()
    if sys.version_info < MIN_PYTHON:
        fail(f"Python {'.'.join(map(str, MIN_PYTHON))} or newer is needed, got {sys.version.split()[0]}: PYTHON=...")
    torch = options.torch or next(r.text for r in read_requirements(ROOT / "requirements" / "torch.txt"))
    # Neither path is resolved: a virtual environment is known by the path of the link that is its interpreter.
    print(choose(options.names, Path(sys.executable), options.venv.absolute(), torch))


if __name__ == "__main__":
    main()
