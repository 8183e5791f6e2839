"""`buckeye ui`: the page, served or in one file; `rl watch`: the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from buckeye.base.distribution import need
from buckeye.errors import UsageError
from buckeye.run_files.known_runs import find_run

if TYPE_CHECKING:
    from buckeye.config.rl import RLConfig

_PORT = 8420


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
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write the run into one file, which opens offline, and end."),
    ] = None,
) -> None:
    """See runs in a browser: why they learn or do not, and what they played, token by token. Reads only, so a
    run may go on, have crashed, or be a copy."""
    from buckeye_ui.sources import Sources

    sources = Sources(run)
    if export is not None:
        from buckeye_ui.export import export as write

        told = write(sources, export)
        typer.echo(f"{export}: {told['groups']} of {told['of']} groups have their texts in it")
        return
    from buckeye_ui.server import serve

    serve(sources, host=host, port=port, usual_port=_PORT, tell=typer.echo)


def watch(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A directory, name or id. Default: ./outputs, or the newest run."),
    ] = None,
) -> None:
    """Watch a run in the terminal, also over ssh: overview, findings, curves, and what it played. Reads only;
    q ends it."""
    need("textual", "`rl watch`")
    path = find_run(run)
    if not _at_terminal():
        raise UsageError(
            "`rl watch` needs a terminal; in a pipe `rl status --json` and `rl curve --json` serve"
        )
    from buckeye_ui.sources import OpenRun
    from buckeye_ui.watch import Watch

    Watch(OpenRun(path.absolute().name, path)).run()


def start_watched() -> Callable[[RLConfig, list[str]], int]:
    """What starts a run with `rl watch` in front of it. Raises UsageError where there is no terminal."""
    need("textual", "--watch")
    if not _at_terminal():
        raise UsageError(
            "--watch needs a terminal. Leave it out; `buckeye rl watch` follows a run from anywhere"
        )
    from buckeye_ui.beside import start_beside

    return start_beside


def _at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
