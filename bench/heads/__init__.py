"""The heads to compare, each an adapter `(x, w, target) -> mean loss`.

Each family is a module beside this one with a table HEADS: name -> a function that imports what it needs and returns
the call. A name may carry a chunk size, `NAME@ROWS`, where the family takes one.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .base import Call, Head, UnavailableError

__all__ = ["GROUPS", "NAMES", "Call", "Head", "UnavailableError", "family", "load", "parse"]

_FAMILIES: dict[str, tuple[str, ...]] = {
    "ours": ("syncfree", "syncfree-lean"),
    "pytorch": ("torch", "torch-fp32", "torch-compile", "torch-lce"),
    "liger": ("liger", "liger-c8", "liger-c16", "liger-fp32", "liger-c8-fp32", "liger-sm90"),
    "cce": ("cce", "cce-exact"),
    "quack": ("quack", "quack-exp"),
    "fla": ("fla",),
}
NAMES = tuple(name for names in _FAMILIES.values() for name in names)

GROUPS: dict[str, tuple[str, ...]] = {
    "ours": _FAMILIES["ours"],
    "pytorch": _FAMILIES["pytorch"],
    "liger": _FAMILIES["liger"],
    "all": ("syncfree", "syncfree@2048", "syncfree-lean", "syncfree-lean@1024", *NAMES[2:-2], "quack-exp@1024", "fla"),
    # Without those that are far behind or twice the same idea: for long sweeps.
    "few": ("syncfree", "syncfree-lean", "torch-compile", "liger", "liger-c8", "cce", "quack", "fla"),
    # Without those that compile or tune themselves anew for each shape.
    "quick": ("syncfree", "syncfree-lean", "torch", "liger", "liger-c8", "cce"),
    "cpu": ("syncfree", "torch", "torch-fp32", "torch-lce"),
}


def family(name: str) -> str:
    """The family of a head, the name of its module.

    Raises:
        ValueError: there is no such head.
    """
    base = name.partition("@")[0]
    for module, names in _FAMILIES.items():
        if base in names:
            return module
    raise ValueError(f"bench: a head must be one of {', '.join(NAMES)} or a group ({', '.join(GROUPS)}), got {name!r}")


def parse(text: str) -> list[str]:
    """Names and groups, separated by commas, in order and each once.

    Raises:
        ValueError: an unknown name, or rows that are no number.
    """
    names: list[str] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        for name in GROUPS.get(part, (part,)):
            family(name)
            _, at, rows = name.partition("@")
            if at and not rows.isdigit():
                raise ValueError(f"bench: NAME@ROWS needs a number of rows, got {name!r}")
            if name not in names:
                names.append(name)
    return names


def load(name: str, device: torch.device) -> Head:
    """Make a head ready.

    Raises:
        UnavailableError: it is not installed or does not run on this device; the message says so in plain words.
    """
    module_name = family(name)
    base, _, rows = name.partition("@")
    module: Any = importlib.import_module(f"{__name__}.{module_name}")
    if device.type not in module.DEVICES:
        raise UnavailableError(f"{base} runs on {' and '.join(module.DEVICES)} only")
    try:
        call: Call = module.HEADS[base](device, int(rows) if rows else None)
    except ImportError as error:
        raise UnavailableError(f"{module.PACKAGE} cannot be imported here: {error}") from error
    return Head(name, module_name, call)
