"""A learning rate and a warm-up for a configuration: how far rates move the policy, then which earns most."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buckeye.base.storage import write_file
from buckeye.config.rl import RLConfig
from buckeye.config.trainer import ConstantSchedulerConfig
from buckeye.errors import RunError, UsageError
from buckeye.run_files.record import write_event
from buckeye_audit.diagnosis.statistics import is_below
from buckeye_audit.tuning.changes import policy_changes
from buckeye_audit.tuning.forks import Fork, Forks, Origin
from buckeye_audit.tuning.search import STEPS, approach, climb, nearest, top_of, warmup_of

TARGET = 0.01
"""The change of the policy a step from which rates are tried by training: KL divergence, nats a token."""
_BATCHES = 3
_STILL = 1e-12  # a learning rate that changes nothing
_TRIES = 6
_LEARNT = 3.0  # standard errors
_FORKS = 5
_MOST_STEPS = 100  # of a fork, where the run has no end
_LONGEST = 1.5  # times the time that a fork is expected to take


def own_warmup(config: RLConfig) -> int:
    """The steps of warm-up that somebody has chosen for a run; 0 where they are the default."""
    scheduler = config.trainer.scheduler
    if isinstance(scheduler, ConstantSchedulerConfig):
        return 0
    return 0 if scheduler.warmup == type(scheduler)().warmup else scheduler.warmup


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What was found: the setting, every rate's change of the policy a step, and the forks. `sure` is whether
    the rate was chosen by training, and not by the policy's change alone."""

    rate: float
    warmup: int
    sure: bool
    changes: dict[float, float]
    forks: list[Fork]
    at_start: float
    file: Path


@dataclass(kw_only=True)
class Tuning:
    """Tries learning rates for `config` in the new folder `root`, for about `budget` seconds, by forks of so
    many `steps`; of as many as there is time for, where that is None."""

    config: RLConfig
    origin: Origin
    root: Path
    budget: float
    steps: int | None
    tell: Callable[[str], None]
    forks: list[Fork] = field(default_factory=list)
    _begun: float = field(default_factory=time.monotonic)

    def run(self) -> Tuned:
        """Do it all. Raises UsageError if the folder is there, RunError if there is nothing to learn from."""
        if self.root.exists():
            raise UsageError(f"{self.root} exists already. Name a new folder: -o DIR")
        self.root.mkdir(parents=True)
        start = float(self.config.trainer.optim.lr)
        self._note("begin", rate=start, budget=self.budget, step=self.origin.step)
        made = Forks(config=self.config, origin=self.origin, root=self.root)
        still = self._still(made)
        changes = approach(
            lambda rate: self._change(still, rate),
            start,
            TARGET,
            tries=_TRIES,
            more=lambda: self._left() > self.budget / 2,
        )
        center = nearest(changes, TARGET)
        self._note("center", rate=center, change=changes[center], target=TARGET)
        steps = self._fork_steps(still)
        scores = climb(lambda rate: self._score(made, still, rate, steps), center)
        most = max(scores, key=lambda rate: scores[rate], default=center)
        at_start = [reward for step in still.rewards for reward in step]
        sure = any(
            fork.rate == most and scores[most] > -math.inf and is_below(at_start, fork.last, _LEARNT)
            for fork in self.forks
        )
        best = top_of(scores, statistics.fmean(at_start)) if sure else center
        begins = self.origin.step == 0  # schedulers count from the start of a run
        needed = warmup_of(policy_changes(still.directory, best)) if begins else 0
        warmup = max(needed, own_warmup(self.config)) if begins else 0
        made.drop_weights(still)
        file = self._write(best, warmup)
        self._note("chosen", rate=best, warmup=warmup, by="training" if sure else "change", file=str(file))
        return Tuned(
            rate=best,
            warmup=warmup,
            sure=sure,
            changes=changes,
            forks=self.forks,
            at_start=still.score or 0.0,
            file=file,
        )

    def _still(self, made: Forks) -> Fork:
        """A fork that trains nothing: its batches are shared by all that follows."""
        still = made.play("still", _STILL, _BATCHES, seconds=self._left())
        if still.score is None:
            raise RunError(f"Nothing can be tried: {still.why}. See {self.root / 'still.log'}")
        self._note("still", reward=still.score, seconds=round(still.seconds, 1))
        return still

    def _change(self, still: Fork, rate: float) -> float:
        """The policy's change a step: the median, as the first is the optimizer's own."""
        found = policy_changes(still.directory, rate)
        change = statistics.median(found) if math.isfinite(found[-1]) else math.nan
        self._note("change", rate=rate, change=change, each=found)
        return change

    def _fork_steps(self, still: Fork) -> int:
        """Of each fork: as many as there is time for, if there are to be _FORKS of them."""
        if self.steps is not None:
            return self.steps
        room = (self._left() / _FORKS - _fork_seconds(still, 0)) / still.step_seconds
        ends = self.config.max_steps
        most = _MOST_STEPS if ends is None else ends - self.origin.step
        return max(STEPS, min(most, int(room)))

    def _score(self, made: Forks, still: Fork, rate: float, steps: int) -> float | None:
        """What a fork of this rate earned: -inf where it lost again what it had gained; None where there is
        no time for it."""
        known = [fork.seconds for fork in self.forks if fork.score is not None]
        needed = max(known, default=_fork_seconds(still, steps))
        if self._left() < needed:
            self._note("no time", rate=rate, left=round(self._left(), 1), needed=round(needed, 1))
            return None
        fork = made.play(f"lr-{rate:.2e}", rate, steps, seconds=max(self._left(), needed) * _LONGEST)
        self.forks.append(fork)
        made.drop_weights(fork)
        self._note(
            "fork",
            rate=rate,
            steps=steps,
            score=fork.score,
            fell=fork.fell,
            seconds=round(fork.seconds, 1),
            why=fork.why,
        )
        return -math.inf if fork.score is None or fork.fell else fork.score

    def _left(self) -> float:
        return self.budget - (time.monotonic() - self._begun)

    def _write(self, rate: float, warmup: int) -> Path:
        """The settings as a file that stands beside the user's."""
        lines = ["# by `buckeye rl tune`; events.jsonl beside it has every decision", "[trainer.optim]"]
        lines.append(f"lr = {rate:.3e}")
        kind = self.config.trainer.scheduler.type
        if warmup or kind != "constant":
            lines += ["", "[trainer.scheduler]", f'type = "{"linear" if kind == "constant" else kind}"']
            lines += [f"warmup = {warmup}", *(["decay = 0"] if kind == "constant" else [])]
        file = self.root / "tuned.toml"
        write_file(file, "\n".join(lines) + "\n")
        return file

    def _note(self, what: str, **details: Any) -> None:
        """A decision, and what it was made by: written down, and told."""
        write_event(self.root, "tune", attempt=1, what=what, **details)
        self.tell(
            f"{what}: "
            + ", ".join(f"{name} {_shown(value)}" for name, value in details.items() if value != "")
        )


def _fork_seconds(still: Fork, steps: int) -> float:
    """What a fork of so many steps takes: its start and its end as long as the still one's."""
    return max(0.0, still.seconds - still.step_seconds * _BATCHES) + still.step_seconds * steps


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)
