"""The routines of `python -m bench`. Each is a module with HELP and run(context)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.context import Context

# In the order of a full run: what the README shows comes first.
NAMES = ("flce", "exact", "ragged", "backlog", "step", "memory", "scale", "overhead", "options", "rows", "gemm", "cpu")
FULL = NAMES[:-1]


@dataclass(frozen=True)
class Routine:
    name: str
    help: str
    run: Callable[[Context], None]


def load(name: str) -> Routine:
    """A routine by name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in NAMES:
        raise ValueError(f"bench: a routine must be one of {', '.join(NAMES)}, got {name!r}")
    module: Any = importlib.import_module(f"{__name__}.{name}")
    return Routine(name, module.HELP, module.run)
