"""Diagnosis of a run: the chain of learning, its first broken link, and what follows from it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from buckeye import runs
from buckeye.analysis.diagnosis.chain import LinkReport, examine
from buckeye.analysis.diagnosis.facts import DiagnosisFacts
from buckeye.base.columns import align_columns, quoted
from buckeye.base.json_lines import printable
from buckeye.errors import UsageError
from buckeye.monitor.finding import Finding
from buckeye.run_files.events import read_events
from buckeye.run_files.logs import was_logged

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, repr=False)
class Diagnosis:
    """Reports of the links, in order, notes on skipped checks, and failed checks with their errors.

    `failure` is the error that ended the run, if one did. `repr` is the text of `rl diagnose`, for notebooks.
    """

    links: Sequence[LinkReport]
    not_looked_at: Sequence[str] = ()
    failed_rules: dict[str, str]
    failure: Finding | None = None

    @property
    def cause(self) -> Finding | None:
        """Error that ended the run, or what broke the first broken link."""
        return self.failure or next((one.broken_by for one in self.links if one.broken_by is not None), None)

    @property
    def findings(self) -> list[Finding]:
        """All findings: the cause, then those of later links, then the `possible` ones."""
        found = [self.failure] if self.failure is not None else []
        found += [finding for link in self.links for finding in link.findings]
        return sorted(found, key=lambda finding: finding.confidence == "possible")

    @property
    def failures(self) -> list[str]:
        """One line per failed check, with their count."""
        return [
            f"check {name} failed ({number} of {len(self.failed_rules)} that did): {error}. `--debug` shows "
            "where"
            for number, (name, error) in enumerate(self.failed_rules.items(), 1)
        ]

    def __repr__(self) -> str:
        """Return the chain, the first broken link with cause, fix and evidence, and what follows from it."""
        cause, others = self.cause, [finding for finding in self.findings if finding is not self.cause]
        parts = [align_columns([_link_row(number, link) for number, link in enumerate(self.links, 1)])]
        if cause is not None:
            parts.append(_finding_text("First broken link", cause))
        else:
            parts.append(
                "No broken link, but some checks failed." if self.failed_rules else "No broken link."
            )
        later = [finding for finding in others if finding.confidence != "possible"]
        if later:
            lines = (f"  {found.name} ({_steps(found)}): {found.seen}" for found in later)
            parts.append("\n".join(["What may follow from it:", *lines]))
        parts += [_finding_text("Possible", finding) for finding in others if finding not in later]
        parts += [f"not checked: {note}" for note in [*self.not_looked_at, *self.failures]]
        return printable("\n\n".join(parts))

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values."""
        return {
            "cause": None if self.cause is None else self.cause.name,
            "links": [
                {
                    "name": link.name,
                    "state": link.state,
                    "measured": link.measured,
                    "findings": [finding.name for finding in link.findings],
                }
                for link in self.links
            ],
            "findings": [asdict(finding) for finding in self.findings],
            "not_looked_at": list(self.not_looked_at),
            "failed_rules": self.failed_rules,
        }


def _link_row(number: int, link: LinkReport) -> tuple[str, str, str, str]:
    broken = link.broken_by
    said = broken.name if broken is not None else "; ".join(link.measured)
    return f"{number}", link.name, link.state.upper() if broken is not None else link.state, said


def _steps(finding: Finding) -> str:
    is_one_step = finding.since == finding.until
    return f"step {finding.since}" if is_one_step else f"steps {finding.since} to {finding.until}"


def _finding_text(title: str, finding: Finding) -> str:
    shown = [("evidence", f"{evidence.fact}: {evidence.command}") for evidence in finding.evidence]
    rows = [("cause", finding.cause), ("fix", finding.advice), *(shown or [("see", finding.command)])]
    head = f"{title}: {finding.name} ({finding.confidence}, {_steps(finding)}): {finding.seen}"
    return f"{head}\n{align_columns([('', *row) for row in rows])}"


def diagnose(run: str | Path, *, step: int | None = None, tests: bool = False) -> Diagnosis:
    """Diagnose a run as of `step` (default: its current state).

    `tests` adds active tests for links that the records leave open; they take a minute or two with a small
    model. Raise `UsageError` if the run does not exist. Under `--debug`, exceptions of checks propagate.
    """
    opened = runs.open(run)
    if step is not None and opened.steps and step > opened.steps[-1].number:
        first, last = opened.steps[0].number, opened.steps[-1].number
        raise UsageError(
            f"--step {step}: the run has no step {step}",
            code="BK-RUN-NO-DATA",
            hint=f"choose one of the steps {first} to {last}",
        )
    facts = DiagnosisFacts(opened) if step is None else DiagnosisFacts(opened, step)
    links, failed = examine(facts)
    notes = list[str]()
    if tests:
        from buckeye.analysis.diagnosis.active_tests import run_active_tests

        notes = run_active_tests(facts, links)
    return Diagnosis(
        links=list(links.values()),
        not_looked_at=[*opened.unreadable, *notes],
        failed_rules=failed,
        failure=_failure(facts),
    )


def _failure(facts: DiagnosisFacts) -> Finding | None:
    """Return a finding if the run ended with an error and was not resumed."""
    ends = [
        event for event in read_events(facts.run.path) if event["event"] in ("failure", "start", "attempt")
    ]
    went_on = any(step.number > facts.until for step in facts.run.steps)
    if not ends or ends[-1]["event"] != "failure" or went_on:
        return None
    cause = " ".join(str(ends[-1].get("cause") or "no cause is recorded").split())
    return facts.finding("failed", "the run ended with an error", cause=cause, confidence="sure")


def report_findings(run: Path) -> None:
    """Log the first broken link of a run that has ended, unless its last messages have it.

    A diagnosis error is logged and never ends the run.
    """
    try:
        done = diagnose(run)
    except Exception as error:
        log.info("The diagnosis of the run failed: %s", error)
        return
    for failure in done.failures:
        log.warning("Not checked: %s", failure)
    if done.cause is None:
        return
    if not was_logged(run, done.cause.cause):
        log.warning("Found (%s): %s", done.cause.confidence, done.cause)
    log.warning("Full diagnosis with evidence: buckeye rl diagnose %s", quoted(run))
