"""Input of the checks: a run up to a step, with lazily loaded parts."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from buckeye.analysis.diagnosis.statistics import rms
from buckeye.analysis.diagnosis.token_facts import TokenFacts, token_facts
from buckeye.base.storage import step_directories
from buckeye.monitor.finding import Confidence, Evidence, Finding
from buckeye.monitor.learning_findings import Outcome, findings, outcome_of
from buckeye.monitor.metrics import StepMetrics
from buckeye.runs import Run
from buckeye.runs.trained_step import TrainedStep

_MOST_STEPS = 14
"""Maximum number of kept batches with tokens to inspect: the first, the last, and some between."""
_UNTIL = 2**62
_DTYPES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.03}
_DTYPE_SETTINGS = ("trainer.model.compute_dtype", "trainer.weights.dtype", "inference.model.dtype")
_EARLY = 3  # steps

TRAINED = "split = 'train' AND retried = 0 AND reward IS NOT NULL AND step <= {until}"
"""Condition of the index for rollouts with a reward."""
RECENT = 10
"""Number of the last steps that describe the present state of a run."""


@dataclass(frozen=True)
class DiagnosisFacts:
    """Data of a run up to step `until`, for the checks."""

    run: Run
    until: int = _UNTIL

    @cached_property
    def steps(self) -> list[StepMetrics]:
        """Recorded steps."""
        return [step for step in self.run.steps if step.number <= self.until]

    @cached_property
    def batch_steps(self) -> list[StepMetrics]:
        """Recorded steps with batch metrics."""
        return [step for step in self.steps if step.value("orchestrator/reward/mean") is not None]

    @cached_property
    def early(self) -> int:
        """Last of the first steps. An update cannot cause a fault there."""
        return self.batch_steps[:_EARLY][-1].number if self.batch_steps else 0

    @cached_property
    def has_risen(self) -> bool:
        """True if the reward of the last batches is significantly higher than that of the first ones."""
        return self.outcome is not None and self.outcome.has_risen

    @cached_property
    def outcome(self) -> Outcome | None:
        """Change of the reward; None without two batches."""
        return outcome_of(self.steps)

    def early_mean(self, name: str) -> float | None:
        """Return the mean of a metric over the first steps; None if it is not recorded."""
        known = [value for step, value in self.values(name).items() if step <= self.early]
        return float(np.mean(known)) if known else None

    @cached_property
    def metric_findings(self) -> Sequence[Finding]:
        """Findings from the metrics alone."""
        return findings(self.steps, self.run.path, has_ended=self.has_ended)

    @cached_property
    def has_ended(self) -> bool:
        """True if all steps of the run are done."""
        return self.last + 1 >= (self.run.setting("trainer.max_steps") or math.inf)

    def values(self, name: str) -> dict[int, float]:
        """Return the values of a metric by step."""
        return {step.number: value for step in self.steps if (value := step.value(name)) is not None}

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return rows of the index. `{until}` in the query is replaced by the last step to include."""
        return self.run.query(sql.replace("{until}", str(self.until)), *values)

    @cached_property
    def last(self) -> int:
        """Last recorded step; 0 without any."""
        return self.steps[-1].number if self.steps else 0

    @cached_property
    def batches(self) -> list[TrainedStep]:
        """Sample of the kept batches, in order."""
        kept = [step for step in self.run.kept_steps if step <= self.until]
        if len(kept) > _MOST_STEPS:
            places = np.linspace(0, len(kept) - 1, _MOST_STEPS - 4).round().astype(int)
            kept = sorted({*kept[:2], *kept[-2:], *(kept[place] for place in places)})
        return [found for step in kept if (found := self.run.trained(step)) is not None]

    @cached_property
    def tokens(self) -> TokenFacts:
        """Trained tokens of `batches`."""
        return token_facts(self.batches)

    @cached_property
    def rounding_tolerance(self) -> float:
        """Rounding tolerance between two computations of a log-prob, in nats, from the dtypes."""
        names = {str(self.run.setting(name)) for name in _DTYPE_SETTINGS}
        known = [_DTYPES[name] for name in names if name in _DTYPES]
        devices = {self.run.setting("trainer.model.device"), *(b.record.get("device") for b in self.batches)}
        return max(known, default=_DTYPES["float32" if "cpu" in devices else "bfloat16"])

    @cached_property
    def is_mask_misplaced(self) -> bool:
        """True if the loss mask is misplaced, so that it does not separate prompts from replies."""
        return self.tokens.is_misplaced(self.rounding_tolerance)

    @cached_property
    def measured_tolerance(self) -> float:
        """Tolerance in nats, measured on the first weights; at most `rounding_tolerance`."""
        first = self.tokens.initial_logprob_gap()
        return (
            min(self.rounding_tolerance, max(1e-5, 5 * rms(first)))
            if len(first) >= 20
            else self.rounding_tolerance
        )

    @cached_property
    def model(self) -> Path | None:
        """Directory with the model's tokenizer: the last published weights, or the initial model."""
        published = list(step_directories(self.run.path / "weights").values())
        named = self.run.setting("trainer.model.name") or self.run.setting("model.name")
        there = [*reversed(published), *([Path(named)] if named else [])]
        return next((path for path in there if (path / "tokenizer.json").is_file()), None)

    def command(self, command: str, *words: Any) -> str:
        """Return a `buckeye rl` command line on this run."""
        return shlex.join(["buckeye", "rl", command, str(self.run.path), *map(str, words)])

    def rollouts(self, step: int, *words: Any) -> str:
        """Return the command that shows the rollouts of a step."""
        return self.command("rollouts", "--step", step, *words)

    def metrics(self, *names: str) -> str:
        """Return the command that prints the records with these metrics (regular expressions)."""
        return shlex.join(["grep", "-E", f'"({"|".join(names)})"', str(self.run.path / "metrics.jsonl")])

    def finding(
        self,
        name: str,
        seen: str,
        cause: str,
        advice: str,
        *,
        evidence: Sequence[tuple[str, str]],
        confidence: Confidence = "likely",
        since: int | None = None,
        until: int | None = None,
        **figures: float,
    ) -> Finding:
        """Return a finding. `evidence` pairs facts with commands that show them, the strongest first."""
        until = self.last if until is None else until
        return Finding(
            name=name,
            since=min(until, (self.steps[0].number if self.steps else 0) if since is None else since),
            until=until,
            seen=seen,
            figures={key: value for key, value in figures.items() if math.isfinite(value)},
            cause=cause,
            advice=advice,
            command=evidence[0][1],
            confidence=confidence,
            evidence=tuple(Evidence(fact=fact, command=command) for fact, command in evidence),
        )
