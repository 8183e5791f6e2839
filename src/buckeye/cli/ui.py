"""`buckeye ui`: serve runs in a browser; `rl report`: write one run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from buckeye.base.disk import is_disk_full
from buckeye.cli.env_options import RunArgument
from buckeye.cli.errors import write_error
from buckeye.errors import UsageError

_PORT = 8420
_FILE = "report.html"


def ui(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN|DIR", help="A run, or a directory with runs. Default: all known runs."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. An address that is not local requires a key.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help=f"Port; 0: any free port. Default: {_PORT}, or a free port."),
    ] = None,
) -> None:
    """Inspect runs in a browser: metrics, findings, and rollouts token by token.

    Writes nothing, so the run may be active, crashed, or a copy.
    """
    from buckeye.ui.run_catalog import RunCatalog
    from buckeye.ui.server import serve

    serve(RunCatalog(run), host=host, port=port, usual_port=_PORT, tell=typer.echo)


def report(
    run: RunArgument = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE.html", help=f"Default: {_FILE} in the run directory."),
    ] = None,
) -> None:
    """Write a run as one HTML file that opens offline.

    The file contains findings, curves, evaluations with intervals, rollouts, logs and settings. Keys and the
    folders of this machine are removed.
    """
    from buckeye import runs
    from buckeye.run_files.known_runs import find_run
    from buckeye.ui.export import export
    from buckeye.ui.run_catalog import OpenRun

    opened = runs.open(find_run(None) if run is None else run)
    path = out or opened.path / _FILE
    if out is not None and out.exists():
        raise UsageError(f"--out {out}: the file exists", code="BK-FILE-EXISTS", hint="Name another file")
    try:
        groups, total = export(OpenRun(opened.path.absolute().name, opened.path), path)
    except OSError as error:
        if is_disk_full(error):
            raise
        raise write_error(path, error, hint="Name another file with -o") from None
    typer.echo(f"{path}: contains the rollout texts of {groups} of {total} groups")
