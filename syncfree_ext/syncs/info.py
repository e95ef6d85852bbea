"""What `syncfree info` prints: versions, libraries, devices. Reads only; initialises CUDA only to name devices."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import syncfree_ext
from syncfree_ext import _load


def facts() -> list[tuple[str, str]]:
    """Names and values, in the order in which they are printed."""
    return [
        ("syncfree_ext", f"{syncfree_ext.__version__}, {Path(syncfree_ext.__file__).parent}"),
        ("Python", f"{platform.python_version()}, {platform.platform()}"),
        ("torch", f"{torch.__version__}, built for {_built_for()}"),
        *_libraries(),
        ("driver", _driver()),
        *_devices(),
    ]


def _built_for() -> str:
    if torch.version.cuda is None:
        return "the CPU"
    return f"CUDA {torch.version.cuda} ({', '.join(torch.cuda.get_arch_list()) or 'no architectures reported'})"


def _libraries() -> list[tuple[str, str]]:
    package = Path(syncfree_ext.__file__).parent
    found = []
    for name in ("_C", "_C_cuda"):
        files = sorted(package.glob(f"{name}.*"))
        if not files:
            found.append((name, "not built"))
            continue
        loaded = f"syncfree_ext.{name}" in sys.modules
        text = f"{files[0].name}, {files[0].stat().st_size / 1e6:.1f} MB, {'loaded' if loaded else 'not loaded'}"
        if name == "_C_cuda":
            text += f", {_architectures(files[0])}"
        found.append((name, text))
    return found


def _architectures(library: Path) -> str:
    tool = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")
    if tool is None:
        return "architectures unknown (cuobjdump is not installed)"
    names: set[str] = set()
    for option, suffix in (("--list-elf", ""), ("--list-ptx", " PTX")):
        listing = subprocess.run([tool, option, str(library)], capture_output=True, text=True, check=False).stdout
        for word in listing.replace(".", " ").split():
            if word.startswith("sm_"):
                names.add(word + suffix)
    return ", ".join(sorted(names)) or "no device code found"


def _driver() -> str:
    version = _load._driver_cuda_version()
    return "none" if version is None else f"serves CUDA {version // 1000}.{version % 1000 // 10}"


def _devices() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        return [("devices", "none")]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        capability = f"{properties.major}.{properties.minor}"
        kernels = "own Hopper kernels" if capability == "9.0" else "portable kernels"
        found.append((f"cuda:{index}", f"{properties.name}, {memory:.0f} GiB, capability {capability}, {kernels}"))
    return found
