"""Forks: short runs of one configuration with different learning rates, each in its own process."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye import runs
from buckeye.analysis.comparison.curves import points_of
from buckeye.analysis.diagnosis.statistics import is_below
from buckeye.base.process import PYTHON, ChildProcess
from buckeye.base.storage import remove_directory, step_directories, write_file
from buckeye.config.load import to_json
from buckeye.config.rl import RLConfig
from buckeye.monitor.tracker_threads import TRACKER_FOLDERS

TIMED_OUT = "timed out"
"""Failure reason of a fork that exceeded its time."""

_END_SECONDS = 60.0
_NO_INTERVAL = 10**9  # steps between checkpoints: none is written
_LOG_LINES = 3  # lines of a failed fork's log, for the message: from the last error, or the last lines
_CONSECUTIVE_STEPS = 3
_LATE_WEIGHT = 10.0
_QUARTERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Finished short run, with its rewards by step.

    `seconds` is the total time, and `step_seconds` the time per step. `failure_reason` is "" unless the run
    failed.
    """

    rate: float
    directory: Path
    seconds: float
    step_seconds: float = math.nan
    rewards: Sequence[Sequence[float]] = ()
    failure_reason: str = ""

    @property
    def score(self) -> float | None:
        """Weighted mean reward, or None if the fork failed.

        The second half counts ten times as much as the first: the reward at the end matters more than speed.
        """
        means, early = list(map(statistics.fmean, self.rewards)), len(self.rewards) // 2
        weights = [1.0] * early + [_LATE_WEIGHT] * (len(means) - early)
        return None if self.failure_reason else statistics.fmean(means, weights)

    @property
    def last_rewards(self) -> Sequence[float]:
        """Rewards of the last quarter of the steps, at least of one step."""
        return self._quarters()[-1]

    @property
    def all_rewards(self) -> Sequence[float]:
        """Rewards of all steps."""
        return self._pooled(0, len(self.rewards))

    @property
    def lost_reward(self) -> bool:
        """True if the fork lost reward significantly.

        The last quarter is below the best quarter, or a few consecutive steps are below the first step. A
        later recovery does not count.
        """
        if self.failure_reason:
            return False
        count = _CONSECUTIVE_STEPS
        ends = range(count + 1, len(self.rewards) + 1)
        has_fallen = any(is_below(self._pooled(end - count, end), self.rewards[0]) for end in ends)
        return has_fallen or is_below(self.last_rewards, max(self._quarters(), key=statistics.fmean))

    @property
    def outcome(self) -> dict[str, Any]:
        """Score, mean reward of the last quarter, whether reward was lost, seconds, and reason of failure."""
        return {
            "score": self.score,
            "reward_at_end": None if self.failure_reason else statistics.fmean(self.last_rewards),
            "fell": self.lost_reward,
            "seconds": round(self.seconds, 1),
            "why": self.failure_reason,
        }

    def _quarters(self) -> Sequence[Sequence[float]]:
        size = max(1, len(self.rewards) // _QUARTERS)
        return [self._pooled(end - size, end) for end in range(len(self.rewards), size - 1, -size)][::-1]

    def _pooled(self, start: int, end: int) -> list[float]:
        return [reward for step in self.rewards[start:end] for reward in step]


def train_fork(config: RLConfig, directory: Path, rate: float, steps: int, *, seconds: float) -> Fork:
    """Train `steps` steps in the new `directory`, for at most `seconds`.

    The learning rate is constant, unless `steps` is the length of the whole run: then the run's scheduler is
    used.
    """
    file = directory.with_name(f"{directory.name}.json")
    settings = _settings(config, directory, rate, steps)
    write_file(file, json.dumps(settings, indent=1) + "\n", mode=0o600)
    started = time.monotonic()
    argv = [*PYTHON, "-m", "buckeye", "rl", "@", str(file)]
    failure = _run_command(argv, file.with_suffix(".log"), seconds)
    points = [] if failure else points_of(runs.open(directory))
    if not failure and len(points) < steps:
        failure = f"only {len(points)} of {steps} steps were done"
    duration = points[-1].seconds - points[0].seconds if points else math.nan
    return Fork(
        rate=rate,
        directory=directory,
        seconds=time.monotonic() - started,
        step_seconds=duration / max(1, len(points) - 1),
        rewards=[[reward for group in point.rewards.values() for reward in group] for point in points],
        failure_reason=failure,
    )


def delete_weights(fork: Fork) -> None:
    """Delete the weights and checkpoints of a fork, and keep its records."""
    for name in ("weights", "checkpoints"):
        for path in step_directories(fork.directory / name).values():
            remove_directory(path)


def _settings(config: RLConfig, directory: Path, rate: float, steps: int) -> dict[str, Any]:
    """Return the configuration with the changes for this fork."""
    settings: dict[str, Any] = json.loads(to_json(config))
    for section in (settings, settings["trainer"], settings["orchestrator"], settings["inference"] or {}):
        section |= {name: None for name in TRACKER_FOLDERS if name in section}
        if isinstance(section.get("ckpt"), dict):
            section["ckpt"] |= {"interval": _NO_INTERVAL, "store": None, "resume_step": None}
        section |= {"output_dir": str(directory)} if "output_dir" in section else {}
        section |= {"max_steps": steps} if "max_steps" in section else {}
    settings["orchestrator"] |= {"eval": None}
    settings["trainer"]["optim"]["lr"] = rate
    if steps != config.max_steps:  # a fork that is shorter than the run ends before the rate decays
        settings["trainer"]["scheduler"] = {"type": "constant"}
    settings["trainer"]["trained"]["keep"] = None
    return settings


def _run_command(argv: list[str], log: Path, seconds: float) -> str:
    """Run a command to its end. Return the reason if it failed, else ""."""
    with log.open("wb") as out:
        child = ChildProcess(argv, stdout=out, stderr=out, guarded=True)
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            child.end(_END_SECONDS, session=False)
    if code == 0:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    errors = [number for number, line in enumerate(lines) if "error: " in line]
    start = errors[-1] if errors else max(0, len(lines) - _LOG_LINES)
    return f"exit code {code}: {' '.join(lines[start : start + _LOG_LINES])}"
