"""All rules in reporting order: causes that invalidate all other figures come first."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from buckeye import runs
from buckeye.analysis.diagnosis import rollout_rules, setup_rules, token_rules
from buckeye.analysis.diagnosis.facts import DiagnosisFacts
from buckeye.base.columns import align_columns
from buckeye.base.json_lines import printable
from buckeye.errors import DEBUG_VARIABLE, UsageError
from buckeye.monitor.finding import CONFIDENCES, Finding
from buckeye.monitor.learning_findings import findings
from buckeye.run_files.events import read_events
from buckeye.run_files.logs import was_logged

Rule = Callable[[DiagnosisFacts], Finding | Sequence[Finding] | None]

log = logging.getLogger(__name__)


def _figures(facts: DiagnosisFacts) -> Sequence[Finding]:
    """Return the findings from the metrics alone."""
    return findings(facts.steps, facts.run.path)


def _failed(facts: DiagnosisFacts) -> Finding | None:
    """Return a finding if the run ended with an error and was not resumed."""
    ends = [
        event for event in read_events(facts.run.path) if event["event"] in ("failure", "start", "attempt")
    ]
    went_on = any(step.number > facts.until for step in facts.run.steps)
    if not ends or ends[-1]["event"] != "failure" or went_on:
        return None
    cause = " ".join(str(ends[-1].get("cause") or "no cause is recorded").split())
    return facts.finding(
        "failed",
        "The run ended with an error",
        cause[:500],
        "fix it, then resume with `buckeye rl resume`",
        evidence=[
            ("its last output", facts.command("logs")),
            ("its events", facts.command("logs", "--events")),
        ],
        confidence="sure",
    )


RULES: tuple[Rule, ...] = (
    _failed,
    token_rules.unsampled_tokens,
    token_rules.shifted_logprobs,
    token_rules.rounded_logprobs,
    rollout_rules.advantages_against_rewards,
    setup_rules.kl_of_the_wrong_sign,
    setup_rules.optimizer_state_lost,
    setup_rules.no_assistant_header,
    token_rules.ends_not_trained,
    token_rules.equal_seeds,
    token_rules.weights_do_not_arrive,
    token_rules.mismatch_from_the_start,
    token_rules.mismatch_grows,
    setup_rules.bounds_too_narrow,
    rollout_rules.grader_disagrees,
    rollout_rules.evaluated_on_train,
    rollout_rules.failing_rollouts,
    rollout_rules.slow_environment,
    rollout_rules.grader_never_pays,
    rollout_rules.answer_in_prompt,
    rollout_rules.duplicate_tasks,
    setup_rules.learning_rate_too_high,
    rollout_rules.truncated_replies,
    _figures,
    setup_rules.learning_rate_too_low,
    setup_rules.training_without_transfer,
)

EXPLAINS = {
    "mask_misplaced": (
        "mismatch_from_the_start",
        "temperature_mismatch",
        "end_not_trained",
        "mismatch_after_updates",
    ),
    "rounded_log_probs": ("mismatch_from_the_start", "temperature_mismatch", "mismatch_after_updates"),
    "stale_weights": ("mismatch_after_updates", "moved_too_far", "biased"),
    "one_engine_stale": ("mismatch_after_updates", "moved_too_far"),
    "adapter_scale": ("mismatch_after_updates", "moved_too_far"),
    "weights_arrive_changed": ("mismatch_after_updates", "moved_too_far"),
    "bounds_too_narrow": ("moved_too_far", "learning_rate_too_low", "learning_rate_too_high"),
    "equal_seeds": ("collapsed", "no_spread", "learning_rate_too_low"),
    "kl_wrong_sign": ("learning_rate_too_high", "collapsed", "moved_too_far", "endless"),
    "learning_rate_too_high": (
        "collapsed",
        "moved_too_far",
        "endless",
        "no_spread",
        "none_solved",
        "truncated",
    ),
    "untrained": ("truncated_replies", "learning_rate_too_low", "endless"),
    "truncated_replies": ("truncated",),
    "answer_in_prompt": ("no_transfer",),
    "wrong_tokenizer": (
        "none_solved",
        "no_spread",
        "endless",
        "truncated",
        "truncated_replies",
        "learning_rate_too_low",
    ),
    "temperature_mismatch": ("mismatch_from_the_start", "mismatch_after_updates"),
}
"""Findings that another finding explains; these are not reported separately."""


class Diagnosis(NamedTuple):
    """Findings of a run, notes on skipped checks, and failed rules with their errors."""

    findings: list[Finding]
    not_looked_at: list[str]
    failed_rules: dict[str, str]

    def __str__(self) -> str:
        """Return the findings as text, with cause, fix and evidence of each."""
        texts = [_finding_text(number, finding) for number, finding in enumerate(self.findings, 1)]
        if not texts:
            texts = ["No findings, but some rules failed." if self.failed_rules else "No findings."]
        notes = [*self.not_looked_at, *self.failures]
        return "\n\n".join([*texts, *(f"not checked: {printable(note)}" for note in notes)])

    @property
    def failures(self) -> list[str]:
        """One line per failed rule, with their count."""
        return [
            f"rule {name} failed ({number} of {len(self.failed_rules)} that did): {error}. `--debug` shows "
            "where"
            for number, (name, error) in enumerate(self.failed_rules.items(), 1)
        ]


def _finding_text(number: int, finding: Finding) -> str:
    rows = [("", "cause", finding.cause), ("", "fix", finding.advice)]
    rows += [("", "evidence", f"{evidence.fact}: {evidence.command}") for evidence in finding.evidence]
    if not finding.evidence:
        rows.append(("", "see", finding.command))
    is_one_step = finding.since == finding.until
    steps = f"step {finding.since}" if is_one_step else f"steps {finding.since} to {finding.until}"
    head = f"{number}. {finding.name} ({finding.confidence}, {steps}): {finding.seen}"
    return printable(f"{head}\n{align_columns(rows)}")


def diagnose(run: str | Path, *, step: int | None = None, tests: bool = False) -> Diagnosis:
    """Diagnose a run as of `step` (default: its current state).

    Findings are sorted by confidence, then in the order of `RULES`. A failed rule does not hide the findings
    of the others. `tests` adds the tests that separate causes, which take a minute or two with a small model.
    Raise `UsageError` if the run does not exist. Under `--debug`, exceptions of rules propagate.
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
    found, notes, failed = list[Finding](), list[str](), dict[str, str]()
    for rule in RULES:
        try:
            result = rule(facts)
        except Exception as error:
            if os.environ.get(DEBUG_VARIABLE):
                raise
            failed[rule.__name__.strip("_")] = f"{type(error).__name__}: {error}"
            continue
        found += [result] if isinstance(result, Finding) else result or ()
    if tests:
        from buckeye.analysis.diagnosis.active_tests import run_active_tests

        for finding in run_active_tests(facts):
            if isinstance(finding, str):
                notes.append(finding)
            elif finding.name not in [earlier.name for earlier in found]:
                found.append(finding)
    return Diagnosis(in_order(found), [*opened.unreadable, *notes], failed)


def in_order(found: Iterable[Finding]) -> list[Finding]:
    """Return the findings by confidence, without those that another finding explains."""
    listed = list(found)
    explained = {
        name
        for finding in listed
        if finding.confidence != "possible"
        for name in EXPLAINS.get(finding.name, ())
    }
    result = [finding for finding in listed if finding.name not in explained]
    return sorted(result, key=lambda finding: CONFIDENCES.index(finding.confidence))


def likely_findings(run: Path) -> Sequence[Finding]:
    """Return the findings on a run, except the `possible` ones.

    A diagnosis error is logged and never ends the run.
    """
    try:
        done = diagnose(run)
    except Exception as error:
        log.info("The diagnosis of the run failed: %s", error)
        return ()
    for failure in done.failures:
        log.warning("Not checked: %s", failure)
    return [finding for finding in done.findings if finding.confidence != "possible"]


def report_findings(run: Path) -> None:
    """Log the findings on a run that has ended, except those in its last messages."""
    accused = likely_findings(run)
    for finding in accused:
        if not was_logged(run, finding.cause):
            log.warning("Found (%s): %s", finding.confidence, finding)
    if accused:
        log.warning("Full diagnosis with evidence: buckeye rl diagnose %s", run)
