"""The command line: `python -m bench ROUTINE`, `full`, `merge`, `table`, `plot`, `figures`, `compare`, `heads`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from . import compare as _compare
from . import figures as _figures
from . import heads as _heads
from . import plots, results, routines, shapes, table
from .context import Context, parse_dtype
from .data import KINDS
from .results import Store

app = typer.Typer(
    help="Linear cross-entropy heads side by side: time, memory, exactness.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Tables are wide: a file or a pipe takes them whole.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)

Text = str | None
Shapes = Annotated[Text, typer.Option("--shapes", help="Names, NAME:ROWS or BTxHxV, with commas between.")]
Peers = Annotated[Text, typer.Option("--peers", help="Heads (NAME or NAME@ROWS) and groups, with commas between.")]
Data = Annotated[Text, typer.Option("--data", help=f"Of {', '.join(KINDS)}, with commas between.")]
DType = Annotated[Text, typer.Option("--dtype", help="bfloat16, float16, float32, with commas between.")]
Device = Annotated[Text, typer.Option("--device", help="cuda or cpu; by default the GPU if there is one.")]
Json = Annotated[Path | None, typer.Option("--json", help="The file to add the records to.")]
Resume = Annotated[list[Path] | None, typer.Option("--resume", help="Files or folders whose records count as done.")]
Limit = Annotated[float, typer.Option("--time-limit", help="Seconds after which nothing new is started.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Interleaved rounds.")]
Block = Annotated[
    float | None, typer.Option("--block-ms", help="Length of a timed block: 300 on CUDA, 100 on the CPU.")
]
Again = Annotated[bool, typer.Option("--again", help="Measure what the file already holds once more.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="A folder for the plots of the result.")]
Files = Annotated[list[Path], typer.Argument(help="Result files, or folders of them.")]


class _Stop(typer.Exit):
    """Ends with a message and the code for a wrong command line."""

    def __init__(self, message: object) -> None:
        console.print(str(message), style="red", markup=False)
        super().__init__(2)


def _context(
    shape_names: str | None,
    peers: str | None,
    data: str | None,
    dtype: str | None,
    device: str | None,
    json: Path | None,
    resume: Sequence[Path] | None,
    time_limit: float,
    rounds: int,
    block_ms: float | None,
    again: bool,
) -> Context:
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    store = Store(json, where, again)
    store.resume(resume or [])
    kinds = None if data is None else [k.strip() for k in data.split(",")]
    for kind in kinds or []:
        if kind not in KINDS:
            raise ValueError(f"bench: data must be one of {', '.join(KINDS)}, got {kind!r}")
    return Context(
        device=where,
        store=store,
        shapes=None if shape_names is None else shapes.parse(shape_names),
        heads=None if peers is None else _heads.parse(peers),
        data=kinds,
        dtypes=None if dtype is None else [parse_dtype(d.strip()) for d in dtype.split(",")],
        rounds=rounds,
        block_ms=(300.0 if where.type == "cuda" else 100.0) if block_ms is None else block_ms,
        deadline=time.monotonic() + time_limit,
        echo=lambda line: console.print(line, markup=False, soft_wrap=True),
    )


def _run(names: Sequence[str], ctx: Context, plot: Path | None) -> None:
    for name in names:
        if ctx.is_over():
            break
        routines.load(name).run(ctx)
    for part in table.tables(ctx.store.data):
        console.print(part.render())
    if plot is not None:
        for path in plots.save_all(ctx.store.data, plot):
            console.print(f"wrote {path}", markup=False)


def _command(names: Sequence[str]) -> Callable[..., None]:
    def command(
        shape_names: Shapes = None,
        peers: Peers = None,
        data: Data = None,
        dtype: DType = None,
        device: Device = None,
        json: Json = None,
        resume: Resume = None,
        time_limit: Limit = 540.0,
        rounds: Rounds = 5,
        block_ms: Block = None,
        again: Again = False,
        plot: Plot = None,
    ) -> None:
        try:
            ctx = _context(shape_names, peers, data, dtype, device, json, resume, time_limit, rounds, block_ms, again)
        except (ValueError, OSError) as error:
            raise _Stop(error) from error
        _run(names, ctx, plot)

    return command


for _name in routines.NAMES:
    app.command(_name, help=routines.load(_name).help)(_command([_name]))
app.command(
    "full",
    help=f"All routines in turn ({', '.join(routines.FULL)}); run it again with --resume to go on where it stopped.",
)(_command(routines.FULL))


@app.command("heads")
def list_heads(device: Device = None) -> None:
    """List the heads and groups, and which can be used here."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for name in _heads.NAMES:
        try:
            _heads.load(name, where)
            console.print(f"{name:16s} ready", markup=False)
        except _heads.UnavailableError as missing:
            console.print(f"{name:16s} skipped: {missing}", markup=False)
    for group, names in _heads.GROUPS.items():
        console.print(f"{group:16s} = {', '.join(names)}", markup=False)


def _merged(files: Sequence[Path]) -> dict[str, Any]:
    paths = results.expand(files)
    if not paths:
        raise ValueError(f"bench: no result files in {', '.join(map(str, files))}")
    return results.merge([results.read(path) for path in paths])


@app.command()
def merge(files: Files, json: Annotated[Path, typer.Option("--json", help="The file to write.")]) -> None:
    """Put parts of a run together; of records with the same key the later one stays."""
    try:
        data = _merged(files)
    except (ValueError, OSError) as error:
        raise _Stop(error) from error
    results.write(json, data)
    console.print(f"wrote {json}: {len(data['records'])} records", markup=False)


@app.command("table")
def show(files: Files, markdown: Annotated[bool, typer.Option("--markdown")] = False) -> None:
    """Print the tables of one result."""
    try:
        data = _merged(files)
    except (ValueError, OSError) as error:
        raise _Stop(error) from error
    for part in table.tables(data):
        if markdown:
            print(f"{part.title}\n\n{part.markdown()}\n")
        else:
            console.print(part.render())


@app.command()
def plot(
    files: Files, folder: Annotated[Path, typer.Option("--out", help="Where the plots go.")] = Path("plots")
) -> None:
    """Draw the plots of one result as PNG and SVG."""
    try:
        data = _merged(files)
    except (ValueError, OSError) as error:
        raise _Stop(error) from error
    for path in plots.save_all(data, folder):
        console.print(f"wrote {path}", markup=False)


@app.command()
def figures(
    readme: Annotated[Path, typer.Option(help="The page with the markers.")] = Path("README.md"),
    folder: Annotated[Path, typer.Option("--results", help="The folder of the result files.")] = Path("bench/results"),
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if the page is out of date.")] = False,
) -> None:
    """Draw the plots of the newest result of each device; fill the markers of the README."""
    try:
        changed = _figures.update(readme, folder, check=check)
    except (ValueError, OSError) as error:
        raise _Stop(error) from error
    state = "is out of date: run `make figures`" if check and changed else "updated" if changed else "is up to date"
    console.print(f"{readme} {state}", markup=False)
    if check and changed:
        raise typer.Exit(1)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="The result to compare with.")],
    after: Annotated[Path, typer.Argument(help="The new result.")],
    peers: Annotated[str, typer.Option("--peers", help="Which heads count.")] = "ours",
    time_tolerance: Annotated[float, typer.Option(help="Share of time that is no change.")] = 0.02,
    memory_tolerance: Annotated[float, typer.Option(help="Share of memory that is no change.")] = 0.01,
    error_tolerance: Annotated[float, typer.Option(help="Share of error that is no change.")] = 0.05,
) -> None:
    """Print what got slower, larger or less exact beyond the spread, and fail if anything did."""
    try:
        found = _compare.compare(
            results.read(before),
            results.read(after),
            _heads.parse(peers),
            time=time_tolerance,
            memory=memory_tolerance,
            error=error_tolerance,
        )
    except (ValueError, OSError) as error:
        raise _Stop(error) from error
    for line in found.lines():
        console.print(line, markup=False, soft_wrap=True)
    raise typer.Exit(1 if found.worse else 0)


if __name__ == "__main__":
    app(prog_name="python -m bench")
