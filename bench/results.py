"""Result files: one JSON with the machines measured on and a record for everything measured.

A record is identified by its routine, head, shape, dtype, data, ignored share and variant (`KEY`). A run skips what its
own file or one of the files it resumes from already holds, so that a long run can be cut into short ones; `merge` puts
them together.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

FORMAT = 1
KEY = ("routine", "head", "shape", "dtype", "data", "ignored", "variant")
Record = dict[str, Any]

PACKAGES = (
    "syncfree_ext",
    "triton",
    "liger-kernel",
    "cut-cross-entropy",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "fla-core",
)


def versions() -> dict[str, str]:
    """Of the packages that the heads come from, where they are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _ask(*command: str) -> str | None:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.splitlines()[0] if answer else None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def environment(device: torch.device) -> dict[str, Any]:
    """The machine and the software, as far as they bear on the figures."""
    cuda = device.type == "cuda"
    root = Path(__file__).resolve().parent.parent
    return {
        "device": torch.cuda.get_device_name(device) if cuda else _cpu_name(),
        "kind": device.type,
        "driver": _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": None if cuda else torch.get_num_threads(),
        "commit": _ask("git", "-C", str(root), "rev-parse", "--short", "HEAD") or os.environ.get("BENCH_COMMIT"),
        "packages": versions(),
    }


def _command() -> str:
    """How this run was called, files by their names alone: paths are this machine's."""
    return shlex.join(["bench", *(Path(a).name if "/" in a else a for a in sys.argv[1:])])


def key(record: Record) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in KEY)


def empty() -> dict[str, Any]:
    return {"format": FORMAT, "environments": {}, "records": []}


def read(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        ValueError: it is not one, or of another format.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"bench: {path} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"bench: {path} must be a result file of format {FORMAT}")
    return data


def expand(paths: Iterable[Path]) -> list[Path]:
    """The files themselves, and those in the folders among them, in order of name."""
    files: list[Path] = []
    for path in paths:
        files.extend(sorted(path.glob("*.json")) if path.is_dir() else [path])
    return files


def write(path: Path, data: dict[str, Any]) -> None:
    """Through a second file, so that a run that is cut off leaves the last state whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(_rounded(record), ensure_ascii=False) for record in data["records"]]
    environments = json.dumps(data["environments"], indent=1, ensure_ascii=False)
    head = f'{{"format": {FORMAT},\n"environments": {environments},\n"records": [\n'
    text = head + ",\n".join(lines) + "\n]}\n"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return value


def _better(new: Record, old: Record | None) -> bool:
    """A later record replaces an earlier one, except that a head that was missing never replaces one that was there."""
    return old is None or new["status"] != "skipped" or old["status"] == "skipped"


def merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All records, the later one of those with the same key, under the environments they were measured in.

    Raises:
        ValueError: the parts come from different devices.
    """
    merged = empty()
    records: dict[tuple[Any, ...], Record] = {}
    for part in parts:
        merged["environments"].update(part["environments"])
        for record in part["records"]:
            if _better(record, records.get(key(record))):
                records[key(record)] = record
    devices = {e["device"] for e in merged["environments"].values()}
    if len(devices) > 1:
        raise ValueError(
            f"bench: results of different devices do not belong into one file: {', '.join(sorted(devices))}"
        )
    merged["records"] = list(records.values())
    used = {record["environment"] for record in merged["records"] if "environment" in record}
    merged["environments"] = {name: e for name, e in merged["environments"].items() if name in used} or merged[
        "environments"
    ]
    return merged


@dataclass
class Store:
    """The file that a run adds to, and what is done already. Without a path everything stays in memory."""

    path: Path | None
    device: torch.device
    again: bool = False

    def __post_init__(self) -> None:
        self.data = read(self.path) if self.path is not None and self.path.exists() else empty()
        self._done: dict[tuple[Any, ...], Record] = {key(r): r for r in self.data["records"]}
        self._added: set[tuple[Any, ...]] = set()
        described = environment(self.device)
        self._environment = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:8]
        self._described = described

    def resume(self, paths: Iterable[Path]) -> None:
        """Count what these files hold as done."""
        for path in expand(paths):
            for record in read(path)["records"]:
                if _better(record, self._done.get(key(record))):
                    self._done[key(record)] = record

    def has(self, **identity: Any) -> bool:
        """Whether there is nothing left to do for this key. A head that was not installed is tried again."""
        wanted = key(identity)
        if wanted in self._added:
            return True
        return not self.again and wanted in self._done and self._done[wanted]["status"] != "skipped"

    def add(self, record: Record) -> None:
        """Keep a record and write the file. `status` is ok, or wrong, failed or skipped for a `reason`."""
        identity = key(record)
        record = {
            **record,
            "environment": self._environment,
            "command": _command(),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        self.data["environments"][self._environment] = self._described
        old = next((r for r in self.data["records"] if key(r) == identity), None)
        if _better(record, old):
            self.data["records"] = [r for r in self.data["records"] if key(r) != identity] + [record]
        self._done[identity] = record
        self._added.add(identity)
        if self.path is not None:
            write(self.path, self.data)
