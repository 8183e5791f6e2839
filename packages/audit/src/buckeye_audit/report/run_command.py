"""`rl report`: a run in one file that can be sent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from buckeye.base.distribution import install_command
from buckeye.errors import UsageError
from buckeye.run_files.known_runs import find_run


def run_report(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A directory, name or id. Default: ./outputs, or the newest run."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where it goes; `report` in the run's by default.")
    ] = None,
    baseline: Annotated[
        bool | None,
        typer.Option(
            "--baseline/--no-baseline",
            help="Load the environments, and play policies without content. Default: of runs started here.",
        ),
    ] = None,
) -> None:
    """Report a run as run.html (one file), run.md and pictures: what is wrong, held-out tasks before and
    after, curves, five rollouts, settings, cost, versions and hashes."""
    from buckeye_audit.exchange.sources import opened_run
    from buckeye_audit.report.files import can_draw
    from buckeye_audit.report.run_facts import RunFacts
    from buckeye_audit.report.run_report import write_run_report

    with opened_run(find_run(None) if run is None else run) as (opened, foreign):
        directory = out or (opened if foreign is None else foreign).path / "report"
        if directory.exists() and not directory.is_dir():
            raise UsageError(f"--out {directory}: this is a file. Name a directory")
        facts = RunFacts(run=opened, foreign=foreign, baseline=baseline, notes=[])
        try:
            paths = write_run_report(facts, directory)
        except OSError as error:
            raise UsageError(
                f"--out {directory}: it cannot be written ({error.strerror or error}). Name another directory"
            ) from None
    for note in facts.notes:
        typer.echo(f"warning: {note}", err=True)
    if not can_draw():
        typer.echo(
            f"warning: no pictures, because matplotlib is not installed: {install_command('docs')}", err=True
        )
    typer.echo("\n".join(map(str, paths)))
