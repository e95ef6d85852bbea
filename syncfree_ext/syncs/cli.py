"""The command line: `syncfree syncs`, `syncfree show`, `syncfree info`. Needs typer and rich (extra "syncs")."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console

from . import allow, runner, table
from .report import Report, merge

# The status of a run that waited more than it may; 2 is for a wrong command line, others are the script's own.
TOO_MANY = 3
NOTHING_MEASURED = 4

app = typer.Typer(help="Tools of syncfree_ext.", no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def _target(path: Path | None) -> Path | None:
    """A file to write, absolute, since the script may change its folder; refused now rather than after a long run."""
    if path is None:
        return None
    folder = path.parent
    if not os.path.isdir(folder):  # noqa: PTH112 (no error where the folder above may not be searched)
        raise typer.BadParameter(f"cannot write '{path}': there is no folder '{folder}'")
    if not os.access(path, os.F_OK) and not os.access(folder, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"cannot write '{path}': the folder '{folder}' is not writable")
    return path.absolute()


def _output(name: str, text: str) -> Any:
    """An option that names a file to write. What exists there already is checked by typer."""
    return typer.Option(name, dir_okay=False, writable=True, callback=_target, help=f"{text} Its folder must exist.")


# typer reads these at run time, so they are no strings, and Python 3.10 knows no `X | None` for it.
_Json = Annotated[Optional[Path], _output("--json", "Write the report as JSON.")]  # noqa: UP045
_Html = Annotated[Optional[Path], _output("--html", "Write the report as a page.")]  # noqa: UP045
_Top = Annotated[int, typer.Option(min=1, help="Lines of the table.")]
_FailOver = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(min=0.0, help=f"Exit with status {TOO_MANY} if the host waits more often than so many times a step."),
]
_Allow = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--allow", exists=True, dir_okay=False, help="File of waits that --fail-over does not count."),
]


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def syncs(
    script: Annotated[str, typer.Argument(help="The script, or with -m the module.")],
    arguments: Annotated[Optional[list[str]], typer.Argument(help="Its command line.")] = None,  # noqa: UP045
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")] = False,
    warmup: Annotated[int, typer.Option(min=0, help="Steps that are not measured.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured.")] = 5,
    profile: Annotated[int, typer.Option(min=0, help="Steps under torch.profiler after that, as a check.")] = 0,
    probe: Annotated[
        float, typer.Option(min=0.0, help="Queue work for so many ms before each step, so that every wait shows.")
    ] = 0.0,
    user: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="A folder or file whose lines count as yours although it lies in site-packages."),
    ] = None,
    keep_going: Annotated[bool, typer.Option(help="Let the script run to its end.")] = False,
    top: _Top = 20,
    json: _Json = None,
    html: _Html = None,
    fail_over: _FailOver = None,
    allow_file: _Allow = None,
) -> None:
    """Run a script and report where its training steps wait for the GPU.

    A step ends with optimizer.step(), or where the script calls syncfree_ext.syncs.step(). The script is stopped three
    steps after the last measured one. Ctrl-C stops it before, with a report of what was seen so far. Under torchrun
    each rank is measured and the first rank of a machine prints the report.
    """
    entries = _entries(allow_file)
    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"there is no file {script!r}", param_hint="SCRIPT")
    outcome = runner.run(
        script,
        arguments or [],
        module=module,
        keep_going=keep_going,
        warmup=warmup,
        steps=steps,
        profile=profile,
        probe_ms=probe,
        user=user or [],
    )
    report: Report | None = outcome.report
    ranks = runner.Ranks.from_environment()
    if ranks is not None:
        report = runner.gather(outcome.report, ranks)
    if report is None:
        raise typer.Exit(outcome.status)
    _write(report, top, json, html)
    status = _status(report, fail_over, entries)
    if outcome.status:
        _say(f"the script ended with status {outcome.status}")
    raise typer.Exit(outcome.status or status)


@app.command()
def show(
    reports: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="JSON reports; several are merged.")
    ],
    top: _Top = 20,
    json: _Json = None,
    html: _Html = None,
    svg: Annotated[Optional[Path], _output("--svg", "Write the table as a picture.")] = None,  # noqa: UP045
    fail_over: _FailOver = None,
    allow_file: _Allow = None,
) -> None:
    """Print reports that were written with --json, merged if there are several."""
    entries = _entries(allow_file)
    read = []
    for path in reports:
        try:
            read.append(Report.from_json(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise typer.BadParameter(f"{path}: {error}", param_hint="REPORTS") from error
    report = merge(read)
    _write(report, top, json, html)
    if svg is not None:
        svg.write_text(table.svg(report, top), encoding="utf-8")
    raise typer.Exit(_status(report, fail_over, entries))


@app.command()
def info() -> None:
    """Print versions, libraries and devices."""
    from . import info as information

    for name, value in information.facts():
        print(f"{name + ':':<14} {value}")


def _say(message: str) -> None:
    print(f"syncfree: {message}", file=sys.stderr)


def _entries(path: Path | None) -> list[allow.Allowed]:
    if path is None:
        return []
    try:
        return allow.read(path)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--allow") from error


def _write(report: Report, top: int, json: Path | None, html: Path | None) -> None:
    console = Console()
    console.print(table.render(report, top, console.width))
    if json is not None:
        report.to_json(json)
    if html is not None:
        report.to_html(html)


def _status(report: Report, fail_over: float | None, entries: list[allow.Allowed]) -> int:
    checked = allow.check(report, entries)
    for entry in checked.unused:
        _say(f"the allow file's entry {entry.text!r} matched nothing")
    if fail_over is None:
        return 0
    if not report.steps or not report.device:
        _say(
            "--fail-over: "
            + ("there is no CUDA device" if report.steps else "no step was measured")
            + ", so nothing is known"
        )
        return NOTHING_MEASURED
    if checked.calls <= fail_over:
        return 0
    _say(f"the host waits {table.number(checked.calls)} times a step where {fail_over:g} are allowed:")
    for row in checked.rows:
        _say(f"  {table.place(row)}: {row.kind}, {table.number(row.calls)} a step")
    return TOO_MANY
