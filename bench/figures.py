"""The figures and the table of the README, made from the result files and put between its markers.

`<!-- bench:table -->` ... `<!-- /bench:table -->` takes the table, `<!-- bench:figures -->` ... `<!-- /bench:figures
-->` the figures. The plots go to bench/figures, those of the CPU and of the GPU side by side.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from . import plots, results
from .results import Record
from .table import Table, rounding_record

_CAPTIONS = {
    "pareto": "Time against peak memory; the dotted line joins the heads that none beats in both.",
    "ragged": "Time against the share of ignored tokens.",
    "scale": "Throughput against the number of tokens.",
    "backlog": "The host while a copy to it drains.",
    "cpu": "Time against peak memory on a CPU.",
}


def newest(folder: Path) -> list[dict[str, Any]]:
    """The latest result of each device, by name, which starts with the date. Folders inside do not count."""
    latest: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        data = results.read(path)
        for environment in data["environments"].values():
            latest[environment["device"]] = data
    unique: list[dict[str, Any]] = []
    for data in latest.values():
        if not any(data is other for other in unique):
            unique.append(data)
    # The GPU first.
    return sorted(unique, key=lambda d: all(e["kind"] == "cpu" for e in d["environments"].values()))


def _form(record: Record, name: str, form: str) -> str:
    value: Any = record.get(name)
    if isinstance(value, dict):
        value = value.get("median")
    return format(value, form) if isinstance(value, (int, float)) else "–"


def _row(record: Record, bound: Record | None) -> list[str]:
    error, bold = record.get("error", {}), plots.is_ours(record["head"])
    # Its products are those of its own run, and its time does not follow from them.
    elsewhere = bound is not None and bound.get("environment") != record.get("environment")
    cells = [
        f"`{record['head']}`" + (", in another run" if elsewhere else ""),
        _form(record, "train_ms", ".2f"),
        _form(record, "x_limit", ".2f"),
        _form(record, "peak_mib", ".0f"),
        _form(record, "infer_ms", ".2f"),
        _form(error, "dx", ".1e"),
        _form(error, "dw", ".1e"),
    ]
    if record["status"] != "ok":
        cells[1:2] = [record["status"]]
    return [f"**{c}**" if bold else c for c in cells]


def summary_tables(data: dict[str, Any]) -> list[Table]:
    """One for each batch of flce and cpu, by time, those that are wrong or failed last; skipped ones are left out."""
    made = []
    records = [r for r in data["records"] if r["routine"] in ("flce", "cpu") and r["status"] != "skipped"]
    for batch in dict.fromkeys((r["routine"], r["shape"], r["dtype"], r["data"]) for r in records):
        shown = [r for r in records if (r["routine"], r["shape"], r["dtype"], r["data"]) == batch]
        heads = [r for r in shown if not r["head"].startswith("limit")]
        bound = next((r for r in shown if r["head"] == "limit"), None)
        heads.sort(key=lambda r: (r["status"] != "ok", r.get("train_ms", {}).get("median", 0.0)))
        size = f"{heads[0]['BT']}×{heads[0]['H']}×{heads[0]['V']}"
        title = f"{batch[1]} ({size}), {batch[2]}, {batch[3]} data"
        if bound is not None:
            title += f"; three matrix products take {bound['train_ms']['median']:.2f} ms"
        header = ["", "ms", "× products", "peak MiB", "forward only, ms", "error dX", "error dW"]
        table = Table(title, header, [_row(r, bound) for r in heads])
        if rounding := rounding_record(heads):
            table.rows.append(["exact, rounded", *["–"] * 4, *(f"{rounding['error'][k]:.1e}" for k in ("dx", "dw"))])
        made.append(table)
    return made


def _machine(data: dict[str, Any]) -> str:
    # Runs on the same machine, of which some had fewer of the packages.
    said: dict[str, dict[str, None]] = {}
    for e in data["environments"].values():
        words = [e["device"], f"driver {e['driver']}" if e.get("driver") else None, f"torch {e['torch']}"]
        packages = [f"{name} {version}" for name, version in e["packages"].items() if name != "syncfree_ext"]
        said.setdefault(", ".join(w for w in words if w), {}).update(dict.fromkeys(packages))
    dates = sorted(r["date"][:10] for r in data["records"])
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    machines = [", ".join([machine, *packages]) for machine, packages in said.items()]
    return f"Measured on {'; '.join(machines)}; {when}."


def blocks(found: list[dict[str, Any]], images: dict[str, str]) -> dict[str, str]:
    """What goes between the markers; images maps the name of a figure to its path on the page."""
    table = []
    for data in found:
        for index, part in enumerate(summary_tables(data)):
            # Of each device one table is open, so that the page goes on soon.
            head = f'<details markdown="1"><summary>{part.title}</summary>' if index else f"{part.title}:"
            table += [head, "", part.markdown(), "", *(["</details>", ""] if index else [])]
        table += [_machine(data), ""]
    pictures = []
    for name, path in images.items():
        pictures += [f"![{_CAPTIONS[name]}]({path})", ""]
    return {"table": "\n".join(table).strip(), "figures": "\n".join(pictures).strip()}


def place(page: str, name: str, content: str) -> str:
    """The page with the content between the markers of that name.

    Raises:
        ValueError: the markers are not there exactly once, in order.
    """
    start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    pattern = re.compile(re.escape(start) + r".*?" + re.escape(end), re.DOTALL)
    if page.count(start) != 1 or page.count(end) != 1 or not pattern.search(page):
        raise ValueError(f"bench: the page must hold {start} and {end} once each, in this order")
    return pattern.sub(lambda _: f"{start}\n{content}\n{end}", page)


def update(readme: Path, folder: Path, *, check: bool = False) -> bool:
    """Draw the plots and fill the markers.

    Args:
        readme: the page.
        folder: of the result files; the plots go to `figures` beside it.
        check: write nothing.

    Returns:
        Whether the page had to change.

    Raises:
        ValueError: there are no results, or a marker is missing.
    """
    found = newest(folder)
    if not found:
        raise ValueError(f"bench: no result files in {folder}")
    target = folder.parent / "figures"
    images: dict[str, str] = {}
    for data in found:
        names = plots.drawable(data) if check else [p.stem for p in plots.save_all(data, target) if p.suffix == ".svg"]
        for name in names:
            images.setdefault(name, (target / f"{name}.svg").relative_to(readme.parent).as_posix())
    page = readme.read_text(encoding="utf-8")
    new = page
    for name, content in blocks(found, images).items():
        new = place(new, name, content)
    if new != page and not check:
        readme.write_text(new, encoding="utf-8")
    return new != page
