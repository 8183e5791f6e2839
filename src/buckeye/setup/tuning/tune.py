"""Find a learning rate: first by the policy change per step, then by the reward after training."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from buckeye.analysis.diagnosis.statistics import is_below
from buckeye.analysis.replay.retrain import measure_policy_changes
from buckeye.base.storage import write_file
from buckeye.config.rl import RLConfig
from buckeye.errors import RunError, UsageError
from buckeye.run_files.events import write_event
from buckeye.setup.tuning.forks import TIMED_OUT, Fork, delete_weights, train_fork
from buckeye.setup.tuning.search import MIN_STEPS, nearest_rate, search_by_change, search_by_score

TARGET = 0.01
"""Target of the policy change: KL divergence per step, in nats per token."""
_BATCHES = 3
_BASELINE_RATE = 1e-12  # a learning rate that does not change the policy
_TRIES = 6
_SIGNIFICANCE = 3.0  # standard errors
_FORKS = 5
_MAX_STEPS = 100  # of a fork, if the run has no max_steps
_TIMEOUT_FACTOR = 1.5  # timeout of a fork, as a multiple of its expected time


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """The learning rate found, every tried rate with the policy's change per step, and the forks.

    `by_training` is False if only the policy change decided. It is True if the best fork raised the reward
    significantly: from `reward_at_start`, the mean of the untrained policy, to `reward_at_end`, the mean of
    the last quarter of the fork. `reward_at_end` is None if every fork failed or lost reward. `enough_budget`
    is the estimated number of seconds for a complete search, or None if this search was complete. A search
    in which no fork learned is complete if its forks had all steps of the run, or 100.
    """

    lr: float
    by_training: bool
    reward_at_start: float
    reward_at_end: float | None
    changes: list[dict[str, float]]
    forks: list[dict[str, Any]]
    file: str
    enough_budget: float | None


@dataclass(kw_only=True)
class Tuning:
    """Search for a learning rate for `config`, in the new folder `root`, for about `budget` seconds."""

    config: RLConfig
    root: Path
    budget: float
    tell: Callable[[str], None]
    forks: list[Fork] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)
    _lacks_time: bool = False

    def run(self) -> TuningResult:
        """Find the rate. Raises UsageError if the folder exists, RunError if the first fork fails."""
        if self.root.exists():
            hint = "Name a new folder with -o"
            raise UsageError(f"{self.root} exists", code="BK-FILE-EXISTS", hint=hint)
        self.root.mkdir(parents=True)
        start = float(self.config.trainer.optim.lr)
        self._record("begin", rate=start, budget=self.budget)
        baseline = self._run_baseline()
        changes = search_by_change(
            partial(self._change, baseline),
            start,
            TARGET,
            tries=_TRIES,
            has_time=self._has_time_for_changes,
        )
        change_seconds = max(0.0, self.budget - self._left() - baseline.seconds) / len(changes)
        center = nearest_rate(changes, TARGET)
        self._record("center", rate=center, change=changes[center], target=TARGET)
        steps = self._fork_steps(baseline)
        search_by_score(lambda rate: self._score(baseline, rate, steps), center)
        delete_weights(baseline)
        usable = [fork for fork in self.forks if not fork.failure_reason and not fork.lost_reward]
        best = max(usable, key=lambda fork: fork.score or 0.0, default=None)
        has_learned = best is not None and is_below(baseline.all_rewards, best.last_rewards, _SIGNIFICANCE)
        rate = best.rate if best is not None and has_learned else center
        file = self.root / "tuned.toml"
        basis = "by training" if has_learned else "from the policy change per step: no fork learned"
        write_file(file, f"# Chosen {basis} (`buckeye rl tune`)\n[trainer.optim]\nlr = {rate:.3e}\n")
        enough = self._enough_budget(baseline, change_seconds, steps, has_learned=has_learned)
        self._record("chosen", rate=rate, by="training" if has_learned else "change", file=str(file))
        return TuningResult(
            lr=rate,
            by_training=has_learned,
            reward_at_start=statistics.fmean(baseline.all_rewards),
            reward_at_end=None if best is None else statistics.fmean(best.last_rewards),
            changes=[{"lr": tried, "kl": change} for tried, change in changes.items()],
            forks=[{"lr": fork.rate, "run": str(fork.directory), **fork.outcome} for fork in self.forks],
            file=str(file),
            enough_budget=enough,
        )

    def _run_baseline(self) -> Fork:
        """Run a fork that does not change the policy, and return it.

        The policy changes are measured on its batches. Its rewards are the rewards before training.
        """
        fork = train_fork(self.config, self.root / "still", _BASELINE_RATE, _BATCHES, seconds=self._left())
        if fork.score is None:
            raise RunError(
                f"the first fork failed: {fork.failure_reason}",
                code="BK-RUN-PROCESS",
                at=str(self.root / "still.log"),
                hint="Raise --budget" if fork.failure_reason == TIMED_OUT else None,
            )
        self._record(
            "still", reward_at_start=statistics.fmean(fork.all_rewards), seconds=round(fork.seconds, 1)
        )
        return fork

    def _change(self, baseline: Fork, rate: float) -> float:
        """Return the policy's change per step: the median, because the optimizer's first step is atypical."""
        changes = measure_policy_changes(baseline.directory, rate)
        change = statistics.median(changes) if math.isfinite(changes[-1]) else math.nan
        self._record("change", rate=rate, change=change)
        return change

    def _has_time_for_changes(self) -> bool:
        """Return True if less than half of the budget is used. The other half is for the forks."""
        has_time = self._left() > self.budget / 2
        self._lacks_time |= not has_time
        return has_time

    def _enough_budget(
        self, baseline: Fork, change_seconds: float, steps: int, *, has_learned: bool
    ) -> float | None:
        """Return the seconds for all policy changes in half of the budget and for all forks.

        If no fork learned in `steps` steps, these are longer forks. Returns None if the budget was enough.
        """
        longest = min(self.config.max_steps or _MAX_STEPS, _MAX_STEPS)
        enough_steps = steps if has_learned else max(steps, longest)
        if not self._lacks_time and enough_steps == steps:
            return None
        fork_seconds = max(self._known_seconds(), default=_fork_seconds(baseline, steps))
        before_forks = baseline.seconds + _TRIES * change_seconds
        return before_forks + max(before_forks, _FORKS * fork_seconds * enough_steps / steps)

    def _known_seconds(self) -> list[float]:
        return [fork.seconds for fork in self.forks if fork.score is not None]

    def _fork_steps(self, baseline: Fork) -> int:
        """Return the number of steps per fork that leaves time for _FORKS forks."""
        steps = (self._left() / _FORKS - _fork_seconds(baseline, 0)) / baseline.step_seconds
        return min(self.config.max_steps or _MAX_STEPS, max(MIN_STEPS, int(steps)))

    def _score(self, baseline: Fork, rate: float, steps: int) -> float | None:
        """Return the score of a fork with this rate.

        -inf: the fork failed or lost reward. None: no time is left for the fork.
        """
        needed = max(self._known_seconds(), default=_fork_seconds(baseline, steps))
        if self._left() < needed:
            self._lacks_time = True
            self._record("no time", rate=rate, left=round(self._left(), 1), needed=round(needed, 1))
            return None
        seconds = max(self._left(), needed) * _TIMEOUT_FACTOR
        fork = train_fork(self.config, self.root / f"lr-{rate:.2e}", rate, steps, seconds=seconds)
        self.forks.append(fork)
        delete_weights(fork)
        self._record("fork", rate=rate, steps=steps, **fork.outcome)
        return -math.inf if fork.score is None or fork.lost_reward else fork.score

    def _left(self) -> float:
        return self.budget - (time.monotonic() - self._started)

    def _record(self, what: str, **details: Any) -> None:
        """Write an event about a decision with its figures, and report it."""
        write_event(self.root, "tune", attempt=1, what=what, **details)
        shown = [
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in details.items()
            if value != ""
        ]
        self.tell(f"{what}: {', '.join(shown)}")


def _fork_seconds(baseline: Fork, steps: int) -> float:
    """Return the expected seconds of a fork: the baseline's start and end, plus `steps` steps."""
    return max(0.0, baseline.seconds - baseline.step_seconds * _BATCHES) + baseline.step_seconds * steps
