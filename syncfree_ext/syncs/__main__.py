"""`syncfree` and `python -m syncfree_ext.syncs`. The latter is `syncfree syncs`."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> None:
    """The console script `syncfree`."""
    try:
        from .cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        name = str(error.name).partition(".")[0]
        raise SystemExit(
            f'syncfree: the command line needs {name}, which is not installed: pip install "syncfree_ext[syncs]"'
        ) from error
    app(sys.argv[1:] if arguments is None else arguments, prog_name="syncfree")


if __name__ == "__main__":
    main(["syncs", *sys.argv[1:]])
