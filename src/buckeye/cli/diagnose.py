"""`buckeye rl diagnose`: print the findings about a run."""

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

_NO_FINDINGS = "No findings."
_NO_FINDINGS_OF_SOME = "No findings, but some rules failed."


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
        texts = [_finding_text(number, finding) for number, finding in enumerate(diagnosis.findings, 1)]
        print("\n\n".join(texts) or (_NO_FINDINGS_OF_SOME if diagnosis.failed_rules else _NO_FINDINGS))
        for note in [*diagnosis.not_looked_at, *diagnosis.failures]:
            print(f"\nnot checked: {printable(note)}")
    if any(finding.confidence != "possible" for finding in diagnosis.findings):
        raise typer.Exit(1)


def _finding_text(number: int, finding: Finding) -> str:
    rows = [("", "cause", finding.cause), ("", "fix", finding.advice)]
    rows += [("", "evidence", f"{evidence.fact}: {evidence.command}") for evidence in finding.evidence]
    if not finding.evidence:
        rows.append(("", "see", finding.command))
    is_one_step = finding.since == finding.until
    steps = f"step {finding.since}" if is_one_step else f"steps {finding.since} to {finding.until}"
    head = f"{number}. {finding.name} ({finding.confidence}, {steps}): {finding.seen}"
    return printable(f"{head}\n{align_columns(rows)}")


COMMANDS = {"rl diagnose": diagnose_run}
