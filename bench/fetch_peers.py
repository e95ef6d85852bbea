"""Brings the peers to a machine without a network: lists the wheels, fetches them into a folder, installs from it.

    python -m bench.fetch_peers list
    python -m bench.fetch_peers fetch wheels                            with a network
    eval "$(python -m bench.fetch_peers install wheels --target site)"  without

By default for CPython 3.12 on x86-64 Linux beside a torch built for CUDA 13 that is there already: nothing is fetched
that comes with it (torch, triton, numpy). Where single files or whole transfers are limited in size, `fetch --part-mb
30` cuts what is larger into pieces in folders part1, part2, ... of about that size, and `install` puts the pieces of
all the folders it is given together.

Cut cross-entropy comes from its repository, because the release in the index is older and wrong with a bias; `--cce`
takes a checkout instead, `--no-cce` leaves it out. Only the standard library is used.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# What each head needs beyond a CUDA build of torch. Exact, because these are the versions that were measured.
PEERS: dict[str, tuple[str, ...]] = {
    "liger": ("liger-kernel==0.8.5",),
    "liger-sm90 and quack": (
        "quack-kernels==0.6.5",
        "nvidia-cutlass-dsl==4.7.0",
        "nvidia-cutlass-dsl-libs-base==4.7.0",
        "nvidia-cutlass-dsl-libs-core==4.7.0",
        "nvidia-cutlass-dsl-libs-cu13==4.7.0",
        "nvidia-cuda-nvdisasm==13.5.37",
        "cuda-python==13.4.4",
        "apache-tvm-ffi==0.1.12",
        "torch-c-dlpack-ext==0.1.5",
        "einops==0.8.2",
    ),
    "fla": ("fla-core==0.6.0", "einops==0.8.2"),
}
CCE_REPOSITORY = "https://github.com/apple/ml-cross-entropy"
CCE_COMMIT = "d42911f"
# pip takes a tag by its exact number, not by "at most".
_PLATFORMS = ("2_39", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2_12", "2_5")
_PIECE = ".piece"
_PATH_PROBE = """
import os, site, sys
before = set(sys.path)
site.addsitedir(sys.argv[1])
print(os.pathsep.join(p for p in sys.path if p not in before))
"""


def requirements() -> list[str]:
    """All wheels from the index, each once."""
    return list(dict.fromkeys(name for names in PEERS.values() for name in names))


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def fetch(folder: Path, python: str, machine: str, cce: str | None) -> None:
    """Download the wheels, and build that of cut cross-entropy, which holds no compiled code."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform=manylinux_{version}_{machine}" for version in _PLATFORMS]
    platforms += [f"--platform={old}_{machine}" for old in ("manylinux2014", "manylinux1")]
    where = ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    for requirement in requirements():
        _pip("download", "--quiet", *where, "--dest", str(folder), requirement)
    if cce is not None:
        _pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), cce)


def split(folder: Path, part_mb: int) -> list[Path]:
    """Sort the files of a folder into part1, part2, ... of at most part_mb MB, cutting what is larger."""
    size = part_mb * 10**6
    pieces: list[Path] = []
    for path in sorted(folder.glob("*.whl")):
        if path.stat().st_size <= size:
            pieces.append(path)
            continue
        with path.open("rb") as source:
            for number, content in enumerate(iter(lambda: source.read(size), b"")):
                piece = path.with_name(f"{path.name}{_PIECE}{number:02d}")
                piece.write_bytes(content)
                pieces.append(piece)
        path.unlink()
    parts: list[list[Path]] = []
    for piece in sorted(pieces, key=lambda p: -p.stat().st_size):
        fits = [part for part in parts if sum(p.stat().st_size for p in part) + piece.stat().st_size <= size]
        if fits:
            fits[0].append(piece)
        else:
            parts.append([piece])
    folders = []
    for number, part in enumerate(parts, 1):
        target = folder / f"part{number}"
        target.mkdir(exist_ok=True)
        for piece in part:
            shutil.move(piece, target / piece.name)
        folders.append(target)
    return folders


def collect(folders: Sequence[Path], target: Path) -> list[Path]:
    """All wheels of the folders (and of the parts inside them), pieces joined, in one folder.

    Raises:
        ValueError: a piece is missing, or there is no wheel.
    """
    target.mkdir(parents=True, exist_ok=True)
    pieces: dict[str, dict[int, Path]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.whl*")):
            name, cut, number = path.name.partition(_PIECE)
            if cut:
                pieces.setdefault(name, {})[int(number)] = path
            else:
                shutil.copy(path, target / name)
    for name, numbered in pieces.items():
        if sorted(numbered) != list(range(len(numbered))):
            raise ValueError(f"fetch_peers: pieces of {name} are missing, there are only {sorted(numbered)}")
        with (target / name).open("wb") as joined:
            for _, piece in sorted(numbered.items()):
                joined.write(piece.read_bytes())
    wheels = sorted(target.glob("*.whl"))
    if not wheels:
        raise ValueError(f"fetch_peers: no wheels in {', '.join(map(str, folders))}")
    return wheels


def install(folders: Sequence[Path], target: Path | None) -> None:
    """Install from folders, without an index and without dependencies: what torch brings must be there.

    With a target, prints the shell command that puts it on the path.
    """
    with tempfile.TemporaryDirectory() as temporary:
        wheels = collect(folders, Path(temporary))
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
        if target is not None:
            options += ["--upgrade", "--target", str(target)]
        _pip("install", *options, *map(str, wheels))
    if target is not None:
        # Python heeds .pth files in its own site-packages only, and the CuTe DSL comes with one.
        answer = subprocess.run(
            [sys.executable, "-c", _PATH_PROBE, str(target.resolve())], check=True, capture_output=True, text=True
        )
        print(f'export PYTHONPATH="{answer.stdout.strip()}${{PYTHONPATH:+:$PYTHONPATH}}"')


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fetch_peers", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="print what is fetched, by head")
    one = verbs.add_parser("fetch", help="download into a folder")
    one.add_argument("folder", type=Path)
    one.add_argument("--python", default="3.12", help="version of Python there")
    one.add_argument("--machine", default="x86_64")
    one.add_argument(
        "--cce", default=f"git+{CCE_REPOSITORY}@{CCE_COMMIT}", help="a checkout, or what pip takes for one"
    )
    one.add_argument("--no-cce", action="store_true")
    one.add_argument("--part-mb", type=int, help="cut into folders of this size")
    two = verbs.add_parser("install", help="install from folders")
    two.add_argument("folders", type=Path, nargs="+")
    two.add_argument("--target", type=Path, help="a folder for PYTHONPATH; by default into this Python")
    chosen = parser.parse_args(arguments)

    if chosen.verb == "list":
        for head, names in PEERS.items():
            print(f"{head}: {' '.join(names)}")
        print(f"cce: {CCE_REPOSITORY} at {CCE_COMMIT}")
    elif chosen.verb == "fetch":
        fetch(chosen.folder, chosen.python, chosen.machine, None if chosen.no_cce else chosen.cce)
        if chosen.part_mb:
            for part in split(chosen.folder, chosen.part_mb):
                print(f"{part}: {sum(p.stat().st_size for p in part.iterdir()) / 1e6:.0f} MB")
    else:
        try:
            install(chosen.folders, chosen.target)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
