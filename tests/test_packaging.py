"""What the build has produced: names, dependencies and version, without which one wheel could not serve every torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import syncfree_ext

PACKAGE = Path(syncfree_ext.__file__).parent
ROOT = Path(__file__).parent.parent
LIBRARIES = sorted(PACKAGE.glob("_C*.so"))

# libtorch and libtorch_cpu are in every torch; the others belong to any Linux with a C++ runtime.
ALLOWED = re.compile(r"lib(torch|torch_cpu|stdc\+\+|gcc_s|gomp|c|m|dl|rt|pthread)\.so(\.\d+)*|ld-linux.*")

needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
each_library = pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name.split(".")[0])


def dynamic_section(library: Path) -> list[tuple[str, str]]:
    """Tag and value of the entries in brackets: NEEDED, RPATH, RUNPATH, SONAME."""
    text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\((NEEDED|RPATH|RUNPATH|SONAME)\).*\[(.*)\]", text)


def undefined_symbols(library: Path) -> list[str]:
    text = subprocess.run(
        ["readelf", "--dyn-syms", "--wide", library], capture_output=True, text=True, check=True
    ).stdout
    return [line.split()[7].split("@")[0] for line in text.splitlines() if " UND " in line and len(line.split()) > 7]


def test_the_cpu_library_is_there() -> None:
    assert "_C.abi3.so" in [library.name for library in LIBRARIES]


@pytest.mark.cuda
def test_the_cuda_library_is_there() -> None:
    assert "_C_cuda.abi3.so" in [library.name for library in LIBRARIES]


@each_library
def test_name_serves_every_python(library: Path) -> None:
    assert library.name.endswith(".abi3.so"), "another suffix would bind the wheel to one version of Python"


@needs_readelf
@each_library
def test_needed_libraries(library: Path) -> None:
    """No libcuda (absent without a driver), libcudart or libc10_cuda (absent in a CPU torch), libtorch_python."""
    needed = [value for tag, value in dynamic_section(library) if tag == "NEEDED"]
    assert "libtorch_cpu.so" in needed
    assert [name for name in needed if not ALLOWED.fullmatch(name)] == []
    # Without this umbrella, a library built against a CPU torch would not bring libtorch_cuda along.
    assert ("libtorch.so" in needed) == library.name.startswith("_C_cuda")


@needs_readelf
@each_library
def test_no_path_of_the_building_machine(library: Path) -> None:
    assert [entry for entry in dynamic_section(library) if entry[0] in {"RPATH", "RUNPATH"}] == []


@needs_readelf
@each_library
def test_only_stable_symbols_of_torch(library: Path) -> None:
    """The stable ABI is C: a mangled name of c10, at or torch is a symbol that the next release may lack."""
    mangled = re.compile(r"_ZN?K?(2at|3c10|5torch)")
    assert [name for name in undefined_symbols(library) if mangled.match(name)] == []


@needs_readelf
@each_library
def test_only_the_limited_api_of_python(library: Path) -> None:
    """Modules, integers in, tuples of numbers out: all in the stable ABI of 3.10."""
    assert {name for name in undefined_symbols(library) if name.startswith(("Py", "_Py"))} <= {
        "PyErr_Occurred",
        "PyErr_SetString",
        "PyEval_RestoreThread",
        "PyEval_SaveThread",
        "PyExc_RuntimeError",
        "PyExc_ValueError",
        "PyFloat_FromDouble",
        "PyLong_AsLongLong",
        "PyLong_FromLongLong",
        "PyLong_FromVoidPtr",
        "PyModuleDef_Init",
        "PyModule_AddIntConstant",
        "PyModule_Create2",
        "PyTuple_New",
        "PyTuple_SetItem",
        "_Py_Dealloc",
        "_Py_NoneStruct",
    }


def test_cuda_library_is_left_alone_without_a_cuda_torch() -> None:
    loaded = "syncfree_ext._C_cuda" in sys.modules
    assert loaded <= (torch.version.cuda is not None)


def test_version() -> None:
    """The version of the metadata is that of pyproject.toml, where both are there."""
    try:
        installed = importlib.metadata.version("syncfree_ext")
    except importlib.metadata.PackageNotFoundError:
        assert syncfree_ext.__version__ == "0+unknown"
        return
    assert syncfree_ext.__version__ == installed
    declared = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert declared is not None
    assert installed == declared[1]


def test_types_are_published() -> None:
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.slow
def test_wheel(tmp_path: Path) -> None:
    """The wheel's tag, and that it holds the libraries and the Python files, and nothing of the tests."""
    if importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("setuptools or pip is not installed")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        tmp_path,
        ROOT,
    ]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"syncfree_ext-[\d.]+-cp310-abi3-\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert {library.name for library in LIBRARIES} == {Path(name).name for name in names if name.endswith(".so")}
    assert "syncfree_ext/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"syncfree_ext"}
