"""`buckeye rl diagnose`: find out why a run does not learn."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from buckeye import runs
from buckeye.base.terminal import stdout_kept
from buckeye.cli.env_options import RunArgument
from buckeye.run_files.known_runs import find_run


def diagnose_run(
    run: RunArgument = None,
    step: Annotated[int | None, typer.Option(min=0, help="Diagnose the run up to this step.")] = None,
    tests: Annotated[
        bool, typer.Option("--try", help="Also run tests: load models, run rollouts, replay a step.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find out why a run does not learn.

    Checks each link from the tasks to the weights, and prints cause, evidence and advice for the first broken
    link. The exit code is 1 if a link is broken.
    """
    from buckeye.analysis.diagnosis.diagnose import diagnose

    directory = runs.open(find_run(None) if run is None else run).path
    with stdout_kept(for_json=as_json):
        diagnosis = diagnose(directory, step=step, tests=tests)
    print(json.dumps(diagnosis.to_json()) if as_json else diagnosis)
    if diagnosis.cause is not None:
        raise typer.Exit(1)
