"""`buckeye env report`: what training did to an environment's held-out tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from buckeye.base.columns import aligned
from buckeye.base.distribution import install_command
from buckeye.errors import UsageError
from buckeye_audit.environment_args import Args, environment_args

_Pairs = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="NAME=VALUE", help="An environment argument, instead of the run's."),
]


def env_report(
    env_id: Annotated[str, typer.Argument(metavar="ID", help="The environment, or its name in the run.")],
    run: Annotated[Path | None, typer.Option(help="Output directory of `rl`.")] = None,
    before: Annotated[Path | None, typer.Option(help="Output directory of `evals`, before training.")] = None,
    after: Annotated[Path | None, typer.Option(help="Output directory of `evals`, after training.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the report goes; `report` in that of the run by default.")
    ] = None,
    arg: _Pairs = None,
    args: Args = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare the held-out tasks before and after training: per family and split, with intervals, beside what
    a policy without content scores."""
    from buckeye_audit.report.files import as_json as to_json
    from buckeye_audit.report.files import write_report
    from buckeye_audit.report.gather import ReportRequest, make_report
    from buckeye_audit.report.text import exact_cells, overview, summary

    given = environment_args(arg, args) if arg or args is not None else None
    directory = output or (run or after or Path()) / "report"
    if directory.exists() and not directory.is_dir():
        raise UsageError(
            f"the report goes into a directory, but {directory} is a file. Name another: --output DIR"
        )
    report = make_report(ReportRequest(env_id=env_id, run=run, before=before, after=after, args=given))
    try:
        files = write_report(report, directory)
    except OSError as error:
        raise UsageError(
            f"the report cannot be written to {directory}: {error.strerror or error}. "
            "Name a directory that can be written with --output."
        ) from None
    if as_json:
        typer.echo(json.dumps(to_json(report), ensure_ascii=False))
        return
    typer.echo(aligned(exact_cells(overview(report))))
    typer.echo("\n" + "\n".join(summary(report)))
    for warning in report.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if not any(path.suffix == ".png" for path in files):
        typer.echo(
            f"warning: no pictures, because matplotlib is not installed: {install_command('docs')}", err=True
        )
    typer.echo("\n" + "\n".join(map(str, files)))
