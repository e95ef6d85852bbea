"""Results as tables, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .results import Record

Cell = Callable[[Record], str]


def _number(record: Record, name: str, form: str, scale: float = 1.0) -> str:
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, dict):
        value = value.get("median")
    return format(value * scale, form) if isinstance(value, (int, float)) else ""


def _field(name: str, form: str, scale: float = 1.0) -> Cell:
    return lambda record: _number(record, name, form, scale)


def _with_spread(name: str) -> Cell:
    def cell(record: Record) -> str:
        value = record.get(name)
        if not isinstance(value, dict):
            return ""
        digits = 1 if value["median"] >= 100 else 2 if value["median"] >= 1 else 3
        return f"{value['median']:.{digits}f} [{value['lo']:.{digits}f}, {value['hi']:.{digits}f}]"

    return cell


def _why(record: Record) -> str:
    if record["status"] != "ok":
        return f"{record['status']}: {record.get('reason', '')}"
    failures = [f"{name.removesuffix('_failure')}: {record[name]}" for name in record if name.endswith("_failure")]
    return "; ".join(failures)


_COLUMNS: dict[str, Cell] = {
    "ms": _with_spread("train_ms"),
    "× limit": _field("x_limit", ".3f"),
    "× real": _field("x_limit_real", ".3f"),
    "× none": _field("x_none", ".3f"),
    "TFLOP/s": _field("tflops", ".3g"),
    "forward": _field("forward_ms", ".3g"),
    "backward": _field("backward_ms", ".3g"),
    "forward only": _with_spread("infer_ms"),
    "× logits": _field("infer_x_limit", ".3f"),
    "peak MiB": _field("peak_mib", ".0f"),
    "workspace MiB": _field("workspace_mib", ".0f"),
    "peak MiB, forward only": _field("infer_peak_mib", ".0f"),
    "error loss": _field("error.loss", ".1e"),
    "error dX": _field("error.dx", ".2e"),
    "error dW": _field("error.dw", ".2e"),
    "host fwd ms": _with_spread("host_forward_ms"),
    "host bwd ms": _with_spread("host_backward_ms"),
    "autograd ms": _with_spread("host_autograd_ms"),
    "GPU fwd ms": _with_spread("gpu_forward_ms"),
    "GPU bwd ms": _with_spread("gpu_backward_ms"),
    "syncs fwd": _field("syncs_forward", ".0f"),
    "syncs bwd": _field("syncs_backward", ".0f"),
    "step ms": _with_spread("step_ms"),
    "GPU idle ms": _field("gpu_idle_ms", ".1f"),
    "eager µs": _with_spread("eager_us"),
    "compiled µs": _with_spread("compiled_us"),
    "graph µs": _with_spread("graph_us"),
    "time ms": _with_spread("ms"),
    "GB/s": _field("gbs", ".0f"),
    "of copy": _field("share_of_copy", ".2f"),
    "note": _why,
}

_TIMED = ("ms", "× limit", "× real", "TFLOP/s", "forward", "backward", "forward only", "× logits")
_SIZED = ("peak MiB", "workspace MiB", "peak MiB, forward only")
_ERROR = ("error loss", "error dX", "error dW")
# A routine with several of them gets a table for each.
_LAYOUT: dict[str, tuple[tuple[str, ...], ...]] = {
    "flce": (_TIMED, (*_SIZED, *_ERROR)),
    "cpu": (_TIMED, (*_SIZED, *_ERROR)),
    "ragged": (("ms", "× limit", "peak MiB", *_ERROR),),
    "scale": (("ms", "× limit", "TFLOP/s", "peak MiB", *_ERROR),),
    "memory": ((*_SIZED, *_ERROR),),
    "exact": (_ERROR,),
    "backlog": (("host fwd ms", "host bwd ms", "autograd ms", "GPU fwd ms", "GPU bwd ms", "syncs fwd", "syncs bwd"),),
    "step": (("step ms", "host fwd ms", "host bwd ms", "GPU idle ms"),),
    "overhead": (("eager µs", "compiled µs", "graph µs"),),
    "options": (("ms", "× none", "× limit", "peak MiB", *_ERROR),),
    "rows": (("time ms", "GB/s", "of copy"),),
    "gemm": (("time ms", "TFLOP/s"),),
}


@dataclass
class Table:
    title: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def markdown(self) -> str:
        lines = ["| " + " | ".join(self.header) + " |", "|---|" + "---:|" * (len(self.header) - 1)]
        lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in self.rows]
        return "\n".join(lines)

    def render(self) -> Any:
        """For a rich console."""
        from rich.box import SIMPLE
        from rich.table import Table as RichTable
        from rich.text import Text

        # Texts, because rich would take a word in brackets for markup.
        out = RichTable(title=Text(self.title), title_justify="left", box=SIMPLE, pad_edge=False)
        for i, name in enumerate(self.header):
            out.add_column(name, justify="left" if i == 0 or name == "note" else "right", no_wrap=name != "note")
        for row in self.rows:
            out.add_row(*map(Text, row))
        return out


def _groups(records: Iterable[Record]) -> dict[tuple[Any, ...], list[Record]]:
    grouped: dict[tuple[Any, ...], list[Record]] = {}
    for r in records:
        # One table for a sweep; otherwise one for each batch.
        sweep = r["routine"] in ("ragged", "scale", "backlog", "options", "gemm", "rows")
        where = (r.get("base", r["shape"]), r["dtype"], r["data"], 0.0 if sweep else r["ignored"])
        grouped.setdefault((r["routine"], *where), []).append(r)
    return grouped


def _point(record: Record) -> str:
    """What distinguishes a row beside its head."""
    if record["routine"] == "ragged":
        return f"{record['ignored']:.0%} ignored"
    if record["routine"] == "scale":
        axis = record["axis"]
        return f"{axis} = {record[axis]}"
    return record["variant"] or ""


def rounding_record(records: Iterable[Record]) -> Record | None:
    """A row for the error that rounding the exact gradients makes by itself."""
    for r in records:
        if "rounding" in r:
            return {**r, "head": "exact, rounded", "status": "ok", "error": r["rounding"]}
    return None


def tables(data: dict[str, Any]) -> list[Table]:
    """At least one for each routine and batch, without the rows and columns that are empty."""
    return [
        _table(records, columns)
        for (routine, *_), records in _groups(data["records"]).items()
        for columns in _LAYOUT.get(routine, ((),))
    ]


def _table(records: list[Record], columns: tuple[str, ...]) -> Table:
    routine = records[0]["routine"]
    shown = list(records)
    if "error dX" in columns and routine in ("exact", "flce", "cpu") and (rounding := rounding_record(records)):
        shown.append({k: rounding[k] for k in ("head", "status", "error", "routine", "variant")})
    names = ["", *columns, "note"]
    rows = [[r["head"], _point(r), *(_COLUMNS[c](r) for c in names[1:])] for r in shown]
    rows = [row for row in rows if any(row[2:])]
    kept = [0, *(i for i in range(1, len(names) + 1) if any(row[i] for row in rows))]
    first = records[0]
    size = f"{first['BT']}×{first['H']}×{first['V']}"
    where = (
        first["base"]
        if routine == "scale"
        else first["shape"]
        if first["shape"] == size.replace("×", "x")
        else (f"{first['shape']} ({size})")
    )
    method = next((r["reference"] for r in records if "reference" in r), None)
    against = f"; errors against {method}" if method and "error dX" in columns else ""
    title = f"{routine}: {where}, {first['dtype']}, {first['data']} data{against}"
    return Table(title, [["head", *names][i] for i in kept], [[row[i] for i in kept] for row in rows])
