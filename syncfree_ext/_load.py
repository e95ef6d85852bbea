"""Loads the compiled libraries, with an error that says what is missing and how to get it.

`_C` holds the schemas and the CPU kernels. `_C_cuda` holds the CUDA kernels; it needs symbols that only a CUDA build of
torch has, so it is loaded only there. Importing the package never initialises CUDA and never fails for want of a GPU:
what is wrong with the CUDA side is reported by the first op that gets a CUDA tensor.
"""

from __future__ import annotations

import ctypes
import importlib
import warnings
from types import ModuleType
from typing import Any, NoReturn

MIN_TORCH = (2, 11)

# `_C_cuda` carries its CUDA runtime inside. Within one major version any newer driver serves it; the first drivers to
# serve a major version, by the number that the driver reports for itself:
_WHEEL_CUDA_RUNTIME = 13000
_FIRST_DRIVER = {12: "525", 13: "580"}

_CUDA_OPS = (
    "flce_forward",
    "flce_backward",
    "cross_entropy_forward",
    "cross_entropy_backward",
    "count_targets",
    "scale_unless_one_",
    "flce_shard_logits",
    "flce_shard_gradient",
    "flce_shard_weight_gradient",
    "flce_shard_store_dx",
    "flce_shard_fused_rows",
    "flce_shard_fused_begin",
    "flce_shard_fused_logits",
    "flce_shard_fused_gradient",
    "flce_shard_fused_weight_gradient",
    "flce_shard_fused_add_targets",
    "flce_shard_fused_store_dx",
    "publish_",
    "mapped_slots",
    "masked_indices",
)

# The registrations live as long as the libraries that made them.
_registrations: list[Any] = []


def load() -> None:
    """Import torch, `_C` and, for a CUDA build of torch, `_C_cuda`.

    Raises:
        ImportError: torch is missing or older than 2.11, or `_C` is missing or does not load. Problems of the CUDA
            library alone raise ImportError later, from the op that is called with a CUDA tensor.
    """
    torch = _import_torch()
    _import_library("_C")
    if torch.version.cuda is None:
        return
    try:
        library = _import_library("_C_cuda")
    except ImportError as error:
        _raise_on_cuda_tensors(str(error))
        return
    problem = _driver_problem(getattr(library, "cuda_runtime_version", _WHEEL_CUDA_RUNTIME), _driver_cuda_version())
    if problem is not None:
        _raise_on_cuda_tensors(problem)


def _import_torch() -> ModuleType:
    wanted = ".".join(map(str, MIN_TORCH))
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"syncfree_ext needs PyTorch {wanted} or newer, and there is no torch in this environment. "
            "Install it with `pip install torch`, then install syncfree_ext again."
        ) from error
    # A development build of 2.11 (2.11.0a0+git...) sorts before 2.11 but has what is needed: compare two numbers only.
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MIN_TORCH:
        raise ImportError(
            f"syncfree_ext needs PyTorch {wanted} or newer, got {torch.__version__}. "
            "Upgrade it with `pip install -U torch`."
        )
    return torch


def _import_library(name: str) -> ModuleType:
    qualified = f"{__package__}.{name}"
    try:
        return importlib.import_module(qualified)
    except ModuleNotFoundError as error:
        if error.name != qualified:
            raise
        raise ImportError(_how_to_build(name)) from error
    except ImportError as error:
        raise ImportError(
            f"{qualified} is there but does not load: {error}. It was probably built against another PyTorch; build it "
            "again, from a checkout: `pip install --no-build-isolation --force-reinstall --no-deps .`"
        ) from error


def _how_to_build(name: str) -> str:
    if name == "_C_cuda":
        return (
            "syncfree_ext was built without CUDA kernels (there is no syncfree_ext._C_cuda), but this PyTorch is a "
            "CUDA build and the op got a CUDA tensor. Install a wheel that has them, or build them from a checkout, "
            "with nvcc on PATH: `SYNCFREE_CUDA=1 pip install --no-build-isolation --force-reinstall --no-deps .`"
        )
    return (
        "syncfree_ext._C, the compiled library, is not built. From a checkout run "
        "`pip install --no-build-isolation --no-deps -e .`; if a wheel is installed, leave the checkout, because "
        "Python finds its folder first."
    )


def _driver_cuda_version() -> int | None:
    """The newest CUDA version that the driver serves (13000 for 13.0), None without one. Does not initialise CUDA."""
    version = ctypes.c_int(0)
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value if status == 0 and version.value > 0 else None


def _driver_problem(runtime: int, driver: int | None) -> str | None:
    if driver is None or driver // 1000 >= runtime // 1000:
        return None
    major = runtime // 1000
    needed = f"driver {_FIRST_DRIVER[major]} or newer" if major in _FIRST_DRIVER else "a newer driver"
    return (
        f"syncfree_ext's CUDA kernels are built with the CUDA {major} runtime and need an NVIDIA {needed}; the "
        f"installed driver serves CUDA {driver // 1000}.{driver % 1000 // 10} at most. Upgrade the driver, or build "
        "syncfree_ext from source with a CUDA toolkit that the driver serves."
    )


def _raise_on_cuda_tensors(problem: str) -> None:
    """Register kernels for CUDA tensors that do nothing but raise ImportError(problem)."""
    from torch.library import Library

    def unavailable(*_args: object, **_kwargs: object) -> NoReturn:
        raise ImportError(problem)

    library: Any = Library("syncfree", "IMPL")
    with warnings.catch_warnings():
        # Over a library that loaded but cannot run here, the dispatcher warns of the second registration.
        warnings.simplefilter("ignore")
        for op in _CUDA_OPS:
            library.impl(op, unavailable, "CUDA")
    _registrations.append(library)
