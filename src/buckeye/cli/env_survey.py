"""`buckeye env survey`: certify all environments of a library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from buckeye.base.terminal import status_line


def env_survey(
    library: Annotated[str, typer.Argument(metavar="LIBRARY", help="reasoning-gym or textarena.")],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Environments of it. Default: all.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the table and certificates.")] = Path(
        "survey"
    ),
    budget: Annotated[float, typer.Option(min=1.0, help="Seconds of rollouts, as of `env check`.")] = 10.0,
    sessions: Annotated[int, typer.Option(min=1, metavar="N", help="Sessions side by side.")] = 50,
    timeout: Annotated[float, typer.Option(min=1.0, help="Maximum seconds per environment.")] = 180.0,
) -> None:
    """Certify all environments of a library, and write survey.md and survey.jsonl.

    If survey.jsonl exists, the command continues with the environments that it lacks.
    """
    from buckeye.evaluation.certify.survey import environments_of, survey, survey_page

    ids = [f"{library}/{name}" for name in names or ()] or environments_of(library)
    flags = ["--budget", str(budget), "--sessions", str(sessions)]
    with status_line(f"listing {library}") as progress:
        rows = survey(ids, out, flags, timeout, progress)
    typer.echo(survey_page(rows))
