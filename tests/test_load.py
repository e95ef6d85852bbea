"""What `import syncfree_ext` says when a part is missing. Each case runs in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from syncfree_ext import _load


def run(prelude: str, body: str) -> str:
    """The standard output of a fresh interpreter that has made `prelude` true before the import."""
    script = textwrap.dedent(prelude) + "\n" + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT = """
try:
    import syncfree_ext
except ImportError as error:
    print(f"{type(error).__name__}: {error}")
else:
    print("imported")
"""

# Makes the import of one module fail as it does when it is absent, or with another error.
BLOCK = """
import sys

class Block:
    def __init__(self, name, error):
        self.name, self.error = name, error

    def find_spec(self, fullname, path=None, target=None):
        if fullname == self.name:
            raise self.error
        return None

def block(name, error=None):
    error = error or ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Block(name, error))
"""


def test_import_does_not_initialise_cuda() -> None:
    out = run("", IMPORT + "import torch; print(torch.cuda.is_initialized())")
    assert out.split() == ["imported", "False"]


def test_no_torch() -> None:
    out = run(BLOCK + "block('torch')", IMPORT)
    assert "ImportError: syncfree_ext needs PyTorch 2.11 or newer, and there is no torch" in out
    assert "pip install torch" in out


@pytest.mark.parametrize(("version", "good"), [("2.10.1", False), ("1.13.0+cu117", False), ("2.11.0a0+git1", True)])
def test_old_torch(version: str, good: bool) -> None:
    out = run(f"import torch; torch.__version__ = torch.torch_version.TorchVersion({version!r})", IMPORT)
    assert ("imported" in out) == good
    assert good or f"needs PyTorch 2.11 or newer, got {version}" in out


def test_library_not_built() -> None:
    out = run(BLOCK + "block('syncfree_ext._C')", IMPORT)
    assert "ImportError: syncfree_ext._C, the compiled library, is not built" in out
    assert "pip install --no-build-isolation" in out


def test_library_of_another_torch() -> None:
    out = run(BLOCK + "block('syncfree_ext._C', ImportError('undefined symbol: xyz'))", IMPORT)
    assert "syncfree_ext._C is there but does not load: undefined symbol: xyz" in out
    assert "--force-reinstall" in out


# On a torch that says it is a CUDA build. There need be no GPU: the CUDA kernel is called on CPU tensors.
CUDA_TORCH = BLOCK + "import torch; torch.version.cuda = '13.0'\n"

CALL_CUDA_KERNEL = """
keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
arguments = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64)
try:
    torch.ops.syncfree.flce_forward.default.redispatch(keys, *arguments)
except ImportError as error:
    print(error)
# The CPU is not concerned.
print(float(syncfree_ext.linear_cross_entropy(*arguments)))
"""


def test_no_cuda_library_for_a_cuda_torch() -> None:
    out = run(CUDA_TORCH + "block('syncfree_ext._C_cuda')", IMPORT + CALL_CUDA_KERNEL)
    assert "imported" in out
    assert "built without CUDA kernels" in out
    assert "SYNCFREE_CUDA=1 pip install" in out
    assert "1.386" in out


def test_cuda_library_that_does_not_load() -> None:
    prelude = CUDA_TORCH + "block('syncfree_ext._C_cuda', ImportError('libfoo.so: cannot open'))"
    out = run(prelude, IMPORT + CALL_CUDA_KERNEL)
    assert "imported" in out
    assert "syncfree_ext._C_cuda is there but does not load: libfoo.so: cannot open" in out


def test_driver_older_than_the_runtime() -> None:
    prelude = (
        CUDA_TORCH
        + """
import importlib, types
sys.modules["syncfree_ext._C_cuda"] = types.ModuleType("syncfree_ext._C_cuda")
import ctypes
real = ctypes.CDLL
class Driver:
    def cuDriverGetVersion(self, version):
        version._obj.value = 12040
        return 0
ctypes.CDLL = lambda name, *args, **kwargs: Driver() if "libcuda" in str(name) else real(name, *args, **kwargs)
"""
    )
    out = run(prelude, IMPORT + CALL_CUDA_KERNEL)
    assert "imported" in out
    assert "need an NVIDIA driver 580 or newer; the installed driver serves CUDA 12.4 at most" in out


@pytest.mark.parametrize(
    ("runtime", "driver", "needs"),
    [
        (13000, None, None),
        (13000, 13000, None),
        (13020, 13000, None),  # any driver of the same major version serves it
        (12080, 13010, None),
        (13000, 12090, "driver 580 or newer"),
        (12080, 11080, "driver 525 or newer"),
        (14000, 13000, "a newer driver"),
    ],
)
def test_driver_problem(runtime: int, driver: int | None, needs: str | None) -> None:
    problem = _load._driver_problem(runtime, driver)
    assert (problem is None) == (needs is None)
    assert needs is None or needs in str(problem)


@pytest.mark.cuda
def test_driver_version_is_read() -> None:
    version = _load._driver_cuda_version()
    assert version is not None
    assert version >= 11000


def test_public_names() -> None:
    import syncfree_ext

    assert all(hasattr(syncfree_ext, name) for name in syncfree_ext.__all__)
    assert all(getattr(syncfree_ext, name).__doc__ for name in syncfree_ext.__all__ if name != "__version__")
    assert torch.ops.syncfree.flce is not None
