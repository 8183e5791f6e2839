"""`buckeye rl diagnose`: print the findings about a run."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from buckeye import runs
from buckeye.run_files.known_runs import find_run


def diagnose_run(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="Run directory, name or id. Default: ./outputs, or the newest run."
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Diagnose the run as it was after this step.")
    ] = None,
    tests: Annotated[
        bool, typer.Option("--try", help="Also run tests: load models, run rollouts, replay a step.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Diagnose a run: findings with cause, evidence and advice, the most certain first.

    Exit code 1 if there are findings.
    """
    from buckeye.analysis.diagnosis.diagnose import diagnose

    directory = runs.open(find_run(None) if run is None else run).path
    diagnosis = diagnose(directory, step=step, tests=tests)
    if as_json:
        findings = [dataclasses.asdict(finding) for finding in diagnosis.findings]
        print(json.dumps({**diagnosis._asdict(), "findings": findings}))
    else:
        print(diagnosis)
    if any(finding.confidence != "possible" for finding in diagnosis.findings):
        raise typer.Exit(1)


COMMANDS = {"rl diagnose": diagnose_run}
