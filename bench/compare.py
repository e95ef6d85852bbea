"""What got slower, larger or less exact from one result to another, beyond the spread of both.

Time is compared as the ratio to the limit of the same run where there is one, because milliseconds differ from day to
day and from card to card. A time counts as worse if the whole spread of the new result lies above that of the old one
and its median is more than the tolerance above. Memory and errors have no spread: the tolerance alone decides.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from .results import KEY, Record, key

_TIMES = {
    "train_ms": "x_limit",
    "infer_ms": "infer_x_limit",
    "forward_ms": None,
    "backward_ms": None,
    "host_forward_ms": None,
    "host_backward_ms": None,
    "gpu_backward_ms": None,
    "step_ms": None,
    "eager_us": None,
    "compiled_us": None,
    "graph_us": None,
    "ms": None,
}
# Below this a time is the resolution of a clock and the mood of a scheduler; in the unit of the field.
_FLOOR = 0.02
_MEMORY = ("peak_mib", "infer_peak_mib")
_ERRORS = ("loss", "dx", "dw")
# An error of the loss below this is rounding of the sum.
_ERROR_FLOOR = 1e-6


@dataclass
class Comparison:
    """Lines for people; `worse` decides the exit code."""

    worse: list[str] = field(default_factory=list)
    better: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    compared: int = 0

    def lines(self) -> list[str]:
        return [
            *(f"worse   {line}" for line in self.worse),
            *(f"better  {line}" for line in self.better),
            *(f"missing {line}" for line in self.missing),
            f"{self.compared} seen: {len(self.worse)} worse, {len(self.better)} better, {len(self.missing)} missing",
        ]


def _name(record: Record) -> str:
    words = [str(record[k]) for k in KEY if record.get(k) not in (None, "", 0.0)]
    return " ".join(words)


def compare(
    before: dict[str, Any],
    after: dict[str, Any],
    heads: Collection[str],
    *,
    time: float = 0.02,
    memory: float = 0.01,
    error: float = 0.05,
) -> Comparison:
    """Records of the heads (with any chunk size) that both results hold, field by field."""
    found = Comparison()
    new = {key(r): r for r in after["records"]}
    for old in before["records"]:
        if old["head"].partition("@")[0] not in heads or old["status"] != "ok":
            continue
        now = new.get(key(old))
        if now is None or now["status"] == "skipped":
            found.missing.append(_name(old))
            continue
        found.compared += 1
        if now["status"] != "ok":
            found.worse.append(f"{_name(old)}: was ok, is {now['status']} ({now.get('reason', 'no reason given')})")
            continue
        _compare_times(old, now, time, found)
        for name in _MEMORY:
            if name in old and name in now:
                _note(found, _name(old), name, old[name], now[name], memory * old[name] + 1.0)
        for name in _ERRORS:
            a, b = old.get("error", {}).get(name), now.get("error", {}).get(name)
            if a is not None and b is not None:
                _note(found, _name(old), f"error of {name}", a, b, error * a + _ERROR_FLOOR)
    return found


def _note(found: Comparison, who: str, what: str, a: float, b: float, slack: float) -> None:
    line = f"{who}: {what} {a:.4g} -> {b:.4g}"
    if not b <= a + slack:
        found.worse.append(line)
    elif b < a - slack:
        found.better.append(line)


def _compare_times(old: Record, now: Record, tolerance: float, found: Comparison) -> None:
    for name, ratio in _TIMES.items():
        a, b = old.get(name), now.get(name)
        # Host times of an unloaded run are single numbers beside the times of the device; only those with a spread
        # count.
        if not isinstance(a, dict) or not isinstance(b, dict):
            continue
        scale_a = scale_b = 1.0
        unit = name
        if ratio is not None and old.get(ratio) and now.get(ratio):
            scale_a, scale_b = old[ratio] / a["median"], now[ratio] / b["median"]
            unit = ratio
        x, y = a["median"] * scale_a, b["median"] * scale_b
        line = f"{_name(old)}: {unit} {x:.4g} -> {y:.4g}"
        slack = max(tolerance * x, _FLOOR * scale_a)
        if y > x + slack and b["lo"] * scale_b > a["hi"] * scale_a:
            found.worse.append(line)
        elif y < x - slack and b["hi"] * scale_b < a["lo"] * scale_a:
            found.better.append(line)
