"""A learning rate for a configuration: how far rates move the policy, then which earns most."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from buckeye.analysis.changes import policy_changes
from buckeye.analysis.diagnosis.statistics import is_below
from buckeye.base.storage import write_file
from buckeye.config.rl import RLConfig
from buckeye.errors import RunError, UsageError
from buckeye.run_files.events import write_event
from buckeye.setup.tuning.forks import Fork, drop_weights, train_fork
from buckeye.setup.tuning.search import STEPS, approach, climb, nearest

TARGET = 0.01
"""The change of the policy a step from which rates are tried by training: KL divergence, nats a token."""
_BATCHES = 3
_STILL = 1e-12  # a learning rate that changes nothing
_TRIES = 6
_LEARNT = 3.0  # standard errors
_FORKS = 5
_MOST_STEPS = 100  # of a fork, where the run has no end
_LONGEST = 1.5  # times the time that a fork is expected to take


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The setting that was found, every rate with the policy's change a step, and the forks. `by_training` is
    True if the rate was chosen by training, and not by the policy's change alone: then the rewards of the
    best fork's last quarter (`reward_at_end` is their mean) are above those that the untrained policy earned
    (`reward_at_start`), beyond chance. Without a fork that did not fail or fall `reward_at_end` is None."""

    lr: float
    by_training: bool
    reward_at_start: float
    reward_at_end: float | None
    changes: list[dict[str, float]]
    forks: list[dict[str, Any]]
    file: str


@dataclass(kw_only=True)
class Tuning:
    """Tries learning rates for `config` in the new folder `root`, for about `budget` seconds."""

    config: RLConfig
    root: Path
    budget: float
    tell: Callable[[str], None]
    forks: list[Fork] = field(default_factory=list)
    _begun: float = field(default_factory=time.monotonic)

    def run(self) -> Tuned:
        """Do it all. Raises UsageError if the folder is there, RunError if there is nothing to learn from."""
        if self.root.exists():
            raise UsageError(f"{self.root} exists already. Name a new folder: -o DIR")
        self.root.mkdir(parents=True)
        start = float(self.config.trainer.optim.lr)
        self._note("begin", rate=start, budget=self.budget)
        still = self._still()
        changes = approach(
            partial(self._change, still),
            start,
            TARGET,
            tries=_TRIES,
            more=lambda: self._left() > self.budget / 2,
        )
        center = nearest(changes, TARGET)
        self._note("center", rate=center, change=changes[center], target=TARGET)
        steps = self._fork_steps(still)
        climb(lambda rate: self._score(still, rate, steps), center)
        drop_weights(still)
        kept = [fork for fork in self.forks if not fork.why and not fork.fell]
        best = max(kept, key=lambda fork: fork.score or 0.0, default=None)
        sure = best is not None and is_below(still.every, best.last, _LEARNT)
        rate = best.rate if best is not None and sure else center
        file = self.root / "tuned.toml"
        write_file(file, f"# by `buckeye rl tune`\n[trainer.optim]\nlr = {rate:.3e}\n")
        self._note("chosen", rate=rate, by="training" if sure else "change", file=str(file))
        return Tuned(
            lr=rate,
            by_training=sure,
            reward_at_start=statistics.fmean(still.every),
            reward_at_end=None if best is None else statistics.fmean(best.last),
            changes=[{"lr": tried, "kl": change} for tried, change in changes.items()],
            forks=[{"lr": fork.rate, "run": str(fork.directory), **fork.outcome} for fork in self.forks],
            file=str(file),
        )

    def _still(self) -> Fork:
        """A fork that trains nothing: the policy's changes are computed on its batches, and its rewards are
        those at the start. Forks that train run their own rollouts."""
        still = train_fork(self.config, self.root / "still", _STILL, _BATCHES, seconds=self._left())
        if still.score is None:
            raise RunError(f"Nothing can be tried: {still.why}. See {self.root / 'still.log'}")
        self._note("still", reward_at_start=statistics.fmean(still.every), seconds=round(still.seconds, 1))
        return still

    def _change(self, still: Fork, rate: float) -> float:
        """The policy's change a step: the median, as the first is the optimizer's own."""
        found = policy_changes(still.directory, rate)
        change = statistics.median(found) if math.isfinite(found[-1]) else math.nan
        self._note("change", rate=rate, change=change)
        return change

    def _fork_steps(self, still: Fork) -> int:
        """Of each fork: as many as there is time for, if there are to be _FORKS of them."""
        room = (self._left() / _FORKS - _fork_seconds(still, 0)) / still.step_seconds
        return min(self.config.max_steps or _MOST_STEPS, max(STEPS, int(room)))

    def _score(self, still: Fork, rate: float, steps: int) -> float | None:
        """The score of a fork with this rate: -inf where it lost again what it had gained; None where there
        is no time for it."""
        known = [fork.seconds for fork in self.forks if fork.score is not None]
        needed = max(known, default=_fork_seconds(still, steps))
        if self._left() < needed:
            self._note("no time", rate=rate, left=round(self._left(), 1), needed=round(needed, 1))
            return None
        seconds = max(self._left(), needed) * _LONGEST
        fork = train_fork(self.config, self.root / f"lr-{rate:.2e}", rate, steps, seconds=seconds)
        self.forks.append(fork)
        drop_weights(fork)
        self._note("fork", rate=rate, steps=steps, **fork.outcome)
        return -math.inf if fork.score is None or fork.fell else fork.score

    def _left(self) -> float:
        return self.budget - (time.monotonic() - self._begun)

    def _note(self, what: str, **details: Any) -> None:
        """Record a decision with the figures it was made by, and tell it."""
        write_event(self.root, "tune", attempt=1, what=what, **details)
        shown = [
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in details.items()
            if value != ""
        ]
        self.tell(f"{what}: {', '.join(shown)}")


def _fork_seconds(still: Fork, steps: int) -> float:
    """The seconds that a fork of `steps` steps takes: its start and its end as long as the still one's."""
    return max(0.0, still.seconds - still.step_seconds * _BATCHES) + still.step_seconds * steps
