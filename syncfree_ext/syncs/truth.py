"""The ground truth: what CUDA itself says it blocked on, from a trace of torch.profiler over a few more steps.

CUPTI sees every call of the CUDA runtime and driver, so nothing hides: waits inside C++ libraries, NCCL's, the
allocator's. It is too slow to be the timer, and a trace names a function where the timer names a line, so it serves to
check the timer: each blocking call is given to the innermost function of the user's around it, and calls in functions
without a row are listed.
"""

from __future__ import annotations

import bisect
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import Report, Truth
from .sites import USER, Frames

# cudaMemcpyAsync and cudaMemcpy block for pageable memory and return at once for pinned; the duration tells.
_ALWAYS = re.compile(r"cu(da)?(Device|Stream|Event|Ctx)Synchronize")
_MAY = re.compile(r"cu(da)?(Memcpy|MemAlloc|Malloc|Free|HostAlloc|MemHostAlloc|HostRegister|MemMap|MemUnmap|MemCreate)")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_FUNCTION = re.compile(r"(?P<file>.*)\((?P<line>\d+)\): (?P<name>.*)")
_CUT_AND_NOT_USER = re.compile(r"(torch|syncfree_ext/syncs)/|(contextlib|threading|runpy)\.py")
_FRAMES = Frames()
_MAY_BLOCK_US = 50.0


@dataclass
class Blocking:
    """One call that blocked the host. Times in microseconds of the trace."""

    name: str
    start: float
    duration: float
    function: str | None  # "file.py(12): name", the user's innermost function around it
    idle: float = 0.0  # GPU idle from the end of the call to the next work


def _may_be_user(file: str) -> bool:
    """The profiler cuts the folders of sys.path from the names of files, so that a library's may pass as well."""
    if Path(file).is_absolute() or file.startswith("<"):
        return _FRAMES.class_of_file(file) == USER
    return not _CUT_AND_NOT_USER.match(file)


def _complete(events: Iterable[Any]) -> Iterable[Mapping[str, Any]]:
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X" and "ts" in event:
            yield event


def parse(trace: Mapping[str, Any], ignore_after: float | None = None) -> list[Blocking]:
    """The blocking calls of a Chrome trace, in order.

    Args:
        trace: what export_chrome_trace wrote.
        ignore_after: a time in the trace's microseconds; the profiler's own synchronize at its stop comes later.

    Raises:
        ValueError: it is no Chrome trace.
    """
    events = trace.get("traceEvents") if isinstance(trace, Mapping) else None
    if not isinstance(events, list):
        raise ValueError('parse: expected a Chrome trace with a list "traceEvents"')
    functions: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    calls: list[tuple[Any, Blocking]] = []
    work: list[tuple[float, float]] = []
    for event in _complete(events):
        category, name = str(event.get("cat", "")).lower(), str(event.get("name", ""))
        start, duration = float(event["ts"]), float(event.get("dur", 0.0))
        if category == "python_function":
            match = _FUNCTION.fullmatch(name)
            if match and _may_be_user(match["file"]):
                functions[event.get("tid")].append((start, start + duration, name))
        elif category in _RUNTIME:
            blocks = _ALWAYS.match(name) or (_MAY.match(name) and duration >= _MAY_BLOCK_US)
            if blocks and (ignore_after is None or start < ignore_after):
                calls.append((event.get("tid"), Blocking(name, start, duration, None)))
        elif category in _ON_GPU:
            work.append((start, start + duration))
    for spans in functions.values():
        spans.sort()
    work.sort()
    starts = [start for start, _ in work]
    drained = _running_maximum([end for _, end in work])
    for tid, call in calls:
        call.function = _innermost(functions.get(tid, ()), call.start)
        end = call.start + call.duration
        following = bisect.bisect_left(starts, end)
        if 0 < following < len(starts):
            call.idle = max(0.0, starts[following] - max(end, drained[following - 1]))
    return sorted((call for _, call in calls), key=lambda call: call.start)


def _running_maximum(values: Sequence[float]) -> list[float]:
    result: list[float] = []
    for value in values:
        result.append(max(value, result[-1]) if result else value)
    return result


def _innermost(spans: Sequence[tuple[float, float, str]], time: float) -> str | None:
    """The latest started span that holds a time."""
    index = bisect.bisect_right(spans, (time, float("inf"), ""))
    for start, end, name in reversed(spans[:index]):
        if start <= time <= end:
            return name
    return None


def summarise(calls: Sequence[Blocking], steps: int, report: Report) -> Truth:
    """Per step, by name; and the functions in which the timer has no row."""
    truth = Truth(steps=steps)
    known = {(Path(row.file).name, _base(row.function)) for row in report.rows}
    # Of a library's line the function is not kept: its file must do.
    known_files = {Path(row.via.rpartition(":")[0]).name for row in report.rows if row.via}
    missing: dict[tuple[str, str], list[float]] = defaultdict(list)
    for call in calls:
        truth.calls[call.name] = truth.calls.get(call.name, 0.0) + 1 / steps
        truth.blocked_ms[call.name] = truth.blocked_ms.get(call.name, 0.0) + call.duration * 1e-3 / steps
        truth.idle_ms += call.idle * 1e-3 / steps
        match = _FUNCTION.fullmatch(call.function) if call.function else None
        where = (Path(match["file"]).name, _base(match["name"])) if match else ("", "")
        # Calls in backward carry no Python frame of the user's: they cannot be matched, only counted.
        if match and where not in known and where[0] not in known_files:
            missing[call.name, call.function or ""].append(call.duration)
    truth.unmatched = sorted(
        ((name, where, len(times) / steps, sum(times) * 1e-3 / steps) for (name, where), times in missing.items()),
        key=lambda entry: -entry[3],
    )
    return truth


def _base(function: str) -> str:
    return function.rpartition(".")[2]


class Profiler:
    """torch.profiler over the steps between `start` and `stop`."""

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self) -> None:
        """Starts the trace."""
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], with_stack=True)
        self._profile.__enter__()

    def stop(self) -> list[Blocking]:
        """Ends the trace and reads it. The synchronize with which the profiler stops is left out."""
        import torch

        with torch.profiler.record_function("syncfree: the last measured step ended"):
            pass
        self._profile.__exit__(None, None, None)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8"))
        self._profile = None
        marks = [e["ts"] for e in _complete(trace["traceEvents"]) if str(e.get("name", "")).startswith("syncfree: the")]
        return parse(trace, min(marks) if marks else None)
