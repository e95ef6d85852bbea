"""Runs a script as `python script.py` would, inside find_syncs, and merges the reports of the ranks of torchrun."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import Report, merge
from .session import find_syncs

# The status of a script that Ctrl-C ended: 128 and the number of SIGINT.
INTERRUPTED = 130

# How long the merging rank waits for the reports of the others, which end at the same step.
_PATIENCE = 60.0


class _Stop(BaseException):
    """Ends the script once everything is measured. No `except Exception` catches it; `finally` and `with` run."""


@dataclass
class Outcome:
    """How a script ended, and what was found until then."""

    report: Report
    status: int  # as a shell sees it: 0 is fine


def run(
    script: str, arguments: Sequence[str], *, module: bool = False, keep_going: bool = False, **options: Any
) -> Outcome:
    """Runs a script, or a module with `module`, as `__main__`.

    A KeyboardInterrupt ends the script like any other error; a second one, while the report is made, is raised.

    Args:
        script: path of the script, or name of the module.
        arguments: its command line.
        module: `script` is a module's name, as for `python -m`.
        keep_going: let the script run to its end, instead of stopping it once everything is measured.
        options: of find_syncs.
    """

    def done(_: Report) -> None:
        if not keep_going:
            raise _Stop

    hook = threading.excepthook

    def ended(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not _Stop:  # steps may be counted in a thread, which is then the one that is stopped
            hook(args)

    saved = sys.argv, sys.path[:]
    threading.excepthook = ended
    sys.argv = [script, *arguments]
    folder = os.getcwd() if module else str(Path(script).resolve().parent)  # noqa: PTH109
    sys.path.insert(0, folder)
    report = Report()
    status = 0
    interrupt: KeyboardInterrupt | None = None
    try:
        with find_syncs(done=done, **options) as report:
            try:
                if module:
                    runpy.run_module(script, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(script, run_name="__main__")
            except KeyboardInterrupt as error:
                interrupt = error
                raise
    except _Stop:
        pass
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt as error:
        if error is not interrupt:
            raise
        traceback.print_exc()
        status = INTERRUPTED
    except Exception:
        traceback.print_exc()
        status = 1
    finally:
        sys.argv, sys.path[:] = saved
        threading.excepthook = hook
    return Outcome(report, status)


@dataclass(frozen=True)
class Ranks:
    """This process among those that torchrun started on this machine."""

    rank: int
    local_rank: int
    local_count: int
    run: str

    @classmethod
    def from_environment(cls) -> Ranks | None:
        """None outside of torchrun and for a single process."""
        env = os.environ
        if int(env.get("LOCAL_WORLD_SIZE", "1")) < 2 or "RANK" not in env:
            return None
        parts = [env.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")]
        # The agent is the parent of all its ranks, and no two agents that live at a time share its number.
        return cls(
            int(env["RANK"]),
            int(env.get("LOCAL_RANK", "0")),
            int(env["LOCAL_WORLD_SIZE"]),
            "-".join([*parts, str(os.getppid())]),
        )

    @property
    def folder(self) -> Path:
        """Where the ranks of this run leave their reports."""
        name = "".join(c if c.isalnum() or c in "-_" else "_" for c in self.run)
        return Path(tempfile.gettempdir()) / f"syncfree-syncs-{os.getuid()}-{name}"


def gather(report: Report, ranks: Ranks, patience: float = _PATIENCE) -> Report | None:
    """Merges the reports of this machine's ranks: the merged one on its first rank, None on the others.

    A rank that leaves no report in time is missing from the merged one, which says so.
    """
    folder = ranks.folder
    folder.mkdir(mode=0o700, exist_ok=True)
    mine = folder / f"{ranks.local_rank}.json"
    partial = mine.with_suffix(".part")
    report.to_json(partial)
    partial.rename(mine)  # whole or not there
    if ranks.local_rank != 0:
        return None
    files = [folder / f"{rank}.json" for rank in range(ranks.local_count)]
    end = time.monotonic() + patience
    while time.monotonic() < end and not all(file.exists() for file in files):
        time.sleep(0.05)
    reports = [Report.from_json(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    merged = merge(reports)
    if len(reports) < ranks.local_count:
        merged.notes.append(f"Reports came from {len(reports)} of {ranks.local_count} ranks.")
    return merged
