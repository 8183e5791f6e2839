"""`buckeye ui`: serve runs in a browser; `rl report`: write one run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from buckeye.errors import UsageError

_PORT = 8420
_FILE = "report.html"


def ui(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|DIR", help="A run, or a directory that has some. Default: all that are known."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that others reach is given a key.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help=f"Port; 0 takes a free one. Default: {_PORT}, else a free one."),
    ] = None,
) -> None:
    """See runs in a browser: why they learn or do not, and what they played, token by token. Reads only, so a
    run may go on, have crashed, or be a copy."""
    from buckeye.ui.run_catalog import RunCatalog
    from buckeye.ui.server import serve

    serve(RunCatalog(run), host=host, port=port, usual_port=_PORT, tell=typer.echo)


def report(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A directory, name or id. Default: ./outputs, or the newest run."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE.html", help=f"Default: {_FILE} in the run's.")
    ] = None,
) -> None:
    """Write a run into one HTML file that opens offline: findings, curves, evaluations with intervals,
    rollouts, logs, settings. Keys and folders of this machine are left out."""
    from buckeye import runs
    from buckeye.run_files.known_runs import find_run
    from buckeye.ui.export import export
    from buckeye.ui.run_catalog import OpenRun

    opened = runs.open(find_run(None) if run is None else run)
    path = out or opened.path / _FILE
    if out is not None and out.exists():
        raise UsageError(f"--out {out} exists already. Name another file")
    try:
        exported = export(OpenRun(opened.path.absolute().name, opened.path), path)
    except OSError as error:
        raise UsageError(
            f"--out {path}: cannot be written ({error.strerror or error}). Name another file"
        ) from None
    typer.echo(f"{path}: {exported.groups} of {exported.total} groups have their texts in it")


COMMANDS = {"ui": ui, "rl report": report}
