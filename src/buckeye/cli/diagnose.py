"""`buckeye rl diagnose`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from buckeye import runs
from buckeye.base.columns import align_columns
from buckeye.base.json_lines import printable
from buckeye.monitor.finding import Finding
from buckeye.run_files.known_runs import find_run

_NOTHING = "Nothing is wrong with it, as far as its records tell."
_NOTHING_LEFT = "Nothing is wrong with it, as far as the rules tell that did not fail."


def diagnose_run(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A directory, name or id. Default: ./outputs, or the newest run."),
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="As it was after this step.")] = None,
    tests: Annotated[
        bool, typer.Option("--try", help="Also make tests: load models, play the environment, replay a step.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What is wrong with a run, why it is thought so, and what to do; the surest first. Exit code 1 if
    anything is."""
    from buckeye.analysis.diagnosis.diagnose import diagnose

    directory = runs.open(find_run(None) if run is None else run).path
    done = diagnose(directory, step=step, tests=tests)
    if as_json:
        findings = [dataclasses.asdict(one) for one in done.findings]
        print(json.dumps({**done._asdict(), "findings": findings}))
    else:
        nothing = _NOTHING_LEFT if done.failed_rules else _NOTHING
        print("\n\n".join(_text(number, one) for number, one in enumerate(done.findings, 1)) or nothing)
        for note in [*done.not_looked_at, *done.failures]:
            print(f"\nnot looked at: {printable(note)}")
    if any(one.confidence != "possible" for one in done.findings):
        raise typer.Exit(1)


def _text(number: int, one: Finding) -> str:
    """A finding in words: what, why it is thought so with commands, what to do."""
    rows = [("", "because", one.cause), ("", "do", one.advice)]
    rows += [("", "seen", f"{evidence.fact}: {evidence.command}") for evidence in one.evidence]
    if not one.evidence:
        rows.append(("", "see", one.command))
    steps = f"steps {one.since} to {one.until}" if one.since != one.until else f"step {one.since}"
    head = f"{number}. {one.name} ({one.confidence}, {steps}): {one.seen}"
    return printable(f"{head}\n{align_columns(rows)}")


COMMANDS = {"rl diagnose": diagnose_run}
