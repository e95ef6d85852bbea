"""Finds where the host waits for the GPU, ranks the lines by what they cost, and keeps a loop free of waits.

`find_syncs` measures steps and reports, `no_sync` and `allow_sync` watch a block, `step` marks the end of a step where
no optimizer does. On the command line: `syncfree syncs train.py`. docs/sync_finder.md tells how to read the report.
"""

from .detector import Checked, Found, SyncError, SyncWarning, allow_sync, no_sync
from .kinds import ADVICE, Kind
from .report import Report, Row, merge
from .session import find_syncs
from .steps import step

__all__ = [
    "ADVICE",
    "Checked",
    "Found",
    "Kind",
    "Report",
    "Row",
    "SyncError",
    "SyncWarning",
    "allow_sync",
    "find_syncs",
    "merge",
    "no_sync",
    "step",
]
