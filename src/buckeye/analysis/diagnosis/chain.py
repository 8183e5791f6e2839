"""Chain of learning: nine links, each with its checks. The first broken link is the cause."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from buckeye.analysis.diagnosis.facts import DiagnosisFacts, Result
from buckeye.analysis.diagnosis.links import (
    answers,
    environment,
    loss,
    model,
    outcome,
    reward,
    sampling,
    sync,
    tasks,
    update,
)
from buckeye.errors import DEBUG_VARIABLE
from buckeye.monitor.finding import CONFIDENCES, Finding

State = Literal["ok", "broken", "unknown"]

Check = Callable[[DiagnosisFacts], Result]

CHAIN: Mapping[str, Sequence[Check]] = {
    "tasks": (answers.narrow_answers, *tasks.CHECKS),
    "model": model.CHECKS,
    "sampling": sampling.CHECKS,
    "environment": environment.CHECKS,
    "reward": reward.CHECKS,
    "advantage and loss": loss.CHECKS,
    "update": update.CHECKS,
    "sync": sync.CHECKS,
    "outcome": outcome.CHECKS,
}
"""Checks by link. Learning needs every link, in this order."""

_BY_ELIMINATION: Sequence[tuple[str, Check]] = (
    ("tasks", tasks.incomplete_prompts),
    ("environment", environment.unrepeatable_observations),
    ("reward", reward.sometimes_random),
    ("tasks", answers.unrelated_answers),
    ("tasks", tasks.unused_prompts),
    ("sampling", sampling.stale_samples),
    ("advantage and loss", loss.updates_miss_advantages),
    ("reward", reward.unlearned_rewards),
)
"""Checks, with their links, whose findings are causes only if no other link is broken."""

_DRIFT = {"collapsed", "endless"}
"""Findings that may be consequences of a missing signal: the policy drifts."""

_VANISHED = {"constant_reward", "none_solved", "no_spread"}
"""Findings that are causes only if they are there from the start."""

METRIC_FINDINGS = {
    **dict.fromkeys(("no_siblings", "truncated"), "sampling"),
    **dict.fromkeys(("biased", "biased_failures"), "environment"),
    **dict.fromkeys(("constant_reward", "none_solved", "no_spread", "all_solved"), "reward"),
    **dict.fromkeys(("collapsed", "endless"), "update"),
    "moved_too_far": "outcome",
}
"""Link of each finding from the metrics."""


@dataclass(kw_only=True, slots=True)
class LinkReport:
    """Measured quantities of a link, with their reference ranges, and its findings."""

    name: str
    measured: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def state(self) -> State:
        """`broken` with a finding that is more than possible; `unknown` with others, or without measures."""
        if self.broken_by is not None:
            return "broken"
        return "ok" if self.measured and not self.findings else "unknown"

    @property
    def broken_by(self) -> Finding | None:
        """First finding that is more than possible: checks of a link are in the order of causes."""
        return next((found for found in self.findings if found.confidence != "possible"), None)

    def add(self, finding: Finding) -> None:
        """Add a finding; `possible` ones come last. Of two with one name, the surer stays."""
        known = next((one for one in self.findings if one.name == finding.name), None)
        if known is None or CONFIDENCES.index(known.confidence) > CONFIDENCES.index(finding.confidence):
            self.findings = [*(one for one in self.findings if one is not known), finding]
            self.findings.sort(key=lambda found: found.confidence == "possible")


def examine(facts: DiagnosisFacts) -> tuple[dict[str, LinkReport], dict[str, str]]:
    """Return the report of each link, in order, and the errors of the checks that failed.

    A failed check does not hide the results of the others. Under `--debug`, its exception propagates.
    """
    reports, failed = {name: LinkReport(name=name) for name in CHAIN}, dict[str, str]()
    for name, checks in CHAIN.items():
        for check in checks:
            result = _run_check(check, facts, failed)
            if isinstance(result, str):
                reports[name].measured.append(result)
            elif result is not None:
                reports[name].add(result)
    for finding in facts.metric_findings:
        if finding.name != "untrained":  # the link `model` measures it with the engine's mismatch
            reports[link_of(facts, finding, is_in_sync=reports["sync"].state != "broken")].add(finding)
    if _broken_by(reports) <= _DRIFT:
        _eliminate(facts, reports, failed)
    if _broken_by(reports):  # `no_rise` is for runs without a cause
        outcome = reports["outcome"]
        outcome.findings = [finding for finding in outcome.findings if finding.name != "no_rise"]
    return reports, failed


def _run_check(check: Check, facts: DiagnosisFacts, failed: dict[str, str]) -> Result:
    """Return the result of a check. If the check fails, add its error to `failed`, and return None."""
    try:
        return check(facts)
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        failed[check.__name__] = f"{type(error).__name__}: {error}"
        return None


def _broken_by(reports: Mapping[str, LinkReport]) -> set[str]:
    return {report.broken_by.name for report in reports.values() if report.broken_by is not None}


def _eliminate(facts: DiagnosisFacts, reports: Mapping[str, LinkReport], failed: dict[str, str]) -> None:
    """Add the first finding of the checks by elimination to its link."""
    for name, check in _BY_ELIMINATION:
        result = _run_check(check, facts, failed)
        if isinstance(result, Finding):
            reports[name].add(result)
            return


def link_of(facts: DiagnosisFacts, finding: Finding, *, is_in_sync: bool) -> str:
    """Return the link of a finding from the metrics.

    An update cannot cause a collapse at the start. Weights that arrive changed can cause one later. Rewards
    that vanish later are a consequence.
    """
    if finding.name in _VANISHED and finding.since > facts.early:
        return "outcome"
    if finding.name == "collapsed" and finding.since <= facts.early:
        return "sampling"
    if finding.name in ("collapsed", "endless") and not is_in_sync:
        return "outcome"
    return METRIC_FINDINGS.get(finding.name, "outcome")
