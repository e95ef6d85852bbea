"""Thin driver: CMake builds the libraries, setuptools packs them.

The two libraries use the stable ABI of torch and the limited API of CPython, so a wheel serves every Python >= 3.10 and
every torch >= 2.11.
Environment: SYNCFREE_CUDA=0|1 (default: when nvcc is found), SYNCFREE_CUDA_ARCHS, SYNCFREE_NATIVE=1, MAX_JOBS.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def tool(name: str, folder: str) -> str:
    """The tool of that name: of its PyPI package where Python sees it, else the first on the PATH."""
    try:
        bundled = Path(getattr(importlib.import_module(name), folder)) / name
        if bundled.exists():
            return str(bundled)
    except (ImportError, AttributeError):
        pass
    try:  # where pip has put it, which may be beside another interpreter whose packages this one sees
        for file in importlib.metadata.files(name) or ():
            if file.name == name and file.parent.name == "bin" and Path(file.locate()).exists():
                return str(Path(file.locate()).resolve())
    except importlib.metadata.PackageNotFoundError:
        pass
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which(name, path=beside) or name


class CMakeBuild(build_ext):
    """Configures once, lets Ninja find out what changed, and copies what was built to where setuptools wants it."""

    def run(self) -> None:
        if importlib.util.find_spec("torch") is None:
            raise SystemExit(
                "syncfree_ext: building needs torch>=2.11; install it, then `pip install --no-build-isolation .`"
            )
        build = ROOT / "build" / "cmake"
        cmake, ninja = tool("cmake", "CMAKE_BIN_DIR"), tool("ninja", "BIN_DIR")
        cuda = {"0": "OFF", "1": "ON", "": "AUTO"}[os.environ.get("SYNCFREE_CUDA", "")]
        configure = [
            cmake,
            "-S",
            str(ROOT),
            "-B",
            str(build),
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DPython3_EXECUTABLE={sys.executable}",
            f"-DSYNCFREE_CUDA={cuda}",
        ]
        if archs := os.environ.get("SYNCFREE_CUDA_ARCHS"):
            configure.append(f"-DSYNCFREE_CUDA_ARCHS={archs}")
        configure.append(f"-DSYNCFREE_NATIVE={'ON' if os.environ.get('SYNCFREE_NATIVE') == '1' else 'OFF'}")
        if build.exists() and not self._same_python(build):
            shutil.rmtree(build)
        subprocess.run(configure, check=True)
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        subprocess.run([cmake, "--build", str(build), "-j", jobs], check=True)
        target = (ROOT if self.inplace else Path(self.build_lib).resolve()) / "syncfree_ext"
        target.mkdir(parents=True, exist_ok=True)
        for old in target.glob("_C*.abi3.so"):
            old.unlink()
        for library in sorted((build / "syncfree_ext").glob("_C*.abi3.so")):
            if library.stem.startswith("_C_cuda") and not self._built_cuda(build):
                continue
            shutil.copy2(library, target / library.name)

    @staticmethod
    def _cache(build: Path) -> str:
        cache = build / "CMakeCache.txt"
        return cache.read_text() if cache.exists() else ""

    def _same_python(self, build: Path) -> bool:
        """A build folder made for another Python, or moved from elsewhere, is made anew."""
        cache = self._cache(build)
        found = re.search(r"^Python3_EXECUTABLE:\w+=(.*)$", cache, re.MULTILINE)
        # A virtual environment has the headers of the Python that it was made from; another torch changes the commands.
        same = found is not None and Path(found[1]).resolve() == Path(sys.executable).resolve()
        return same and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" in cache

    def _built_cuda(self, build: Path) -> bool:
        return "_C_cuda" in (build / "build.ninja").read_text()

    def get_outputs(self) -> list[str]:
        return [str(p) for p in (Path(self.build_lib) / "syncfree_ext").glob("_C*.abi3.so")]


setup(
    ext_modules=[Extension("syncfree_ext._C", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": CMakeBuild},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
