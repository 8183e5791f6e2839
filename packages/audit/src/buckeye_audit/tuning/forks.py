"""Short runs of one configuration with other learning rates: each is a run of its own, in its own process."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye import runs
from buckeye.base.process import ChildProcess
from buckeye.base.storage import remove_directory, step_directories, write_file
from buckeye.config.load import to_json
from buckeye.config.rl import RLConfig
from buckeye.errors import RunError
from buckeye.monitor.tracker import TRACKER_FOLDERS
from buckeye.runs.fork import fork_run
from buckeye.runs.status import find_checkpoint
from buckeye_audit.comparison.curves import points_of
from buckeye_audit.diagnosis.statistics import is_below

_END_SECONDS = 60.0
_NEVER = 10**9  # steps between two checkpoints
_LAST_LINES = 3
_IN_A_ROW = 3
_LATER = 10.0
_PARTS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where forks begin: at the configuration's own start, or at a checkpoint of the run in `run`."""

    run: Path | None = None
    step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """A short run that has ended: what its groups earned, step by step, and how long it took in all and for
    a step. `why` is the reason why it failed."""

    rate: float
    directory: Path
    seconds: float
    step_seconds: float = math.nan
    rewards: Sequence[Sequence[float]] = ()
    why: str = ""

    @property
    def score(self) -> float | None:
        """Its mean reward, in which the second half counts ten times as much as the first: so speed only
        decides between forks that come equally far. None where it failed."""
        means, early = list(map(statistics.fmean, self.rewards)), len(self.rewards) // 2
        weights = [1.0] * early + [_LATER] * (len(means) - early)
        return None if self.why else statistics.fmean(means, weights)

    @property
    def last(self) -> Sequence[float]:
        """What was earned in the last quarter, at least in a step."""
        return self._quarters()[-1]

    @property
    def fell(self) -> bool:
        """Whether the last quarter earned less than the best one, beyond chance, or a few steps in a row less
        than the first one: then it had lost all that it began with, though it may have recovered."""
        if self.why:
            return False
        ends = range(_IN_A_ROW + 1, len(self.rewards) + 1)
        parts = ([one for step in self.rewards[end - _IN_A_ROW : end] for one in step] for end in ends)
        lost = any(is_below(part, self.rewards[0]) for part in parts)
        return lost or is_below(self.last, max(self._quarters(), key=statistics.fmean))

    def _quarters(self) -> Sequence[Sequence[float]]:
        size = max(1, len(self.rewards) // _PARTS)
        ends = range(len(self.rewards), size - 1, -size)
        return [[one for step in self.rewards[end - size : end] for one in step] for end in ends][::-1]


def origin_of(run: Path | None, step: str) -> Origin:
    """The checkpoint that forks go on from. Raises CheckpointError if there is none."""
    return Origin() if run is None else Origin(run=run, step=find_checkpoint(run, step).step)


@dataclass(frozen=True, kw_only=True)
class Forks:
    """Makes forks of `config` in `root`."""

    config: RLConfig
    origin: Origin
    root: Path

    def play(self, name: str, rate: float, steps: int, *, seconds: float) -> Fork:
        """Train so many steps, for at most so many seconds: with the run's scheduler where that is all of the
        run, else with a constant learning rate."""
        directory, file = self.root / name, self.root / f"{name}.json"
        write_file(file, json.dumps(self._settings(directory, rate, steps), indent=1) + "\n", mode=0o600)
        argv = [sys.executable, "-m", "buckeye", "rl", "@", str(file)]
        if self.origin.run is not None:
            fork_run(self.origin.run, step=str(self.origin.step), target=directory)
            argv.append("--resume")
        begun = time.monotonic()
        why = _carry_out(argv, self.root / f"{name}.log", seconds)
        return self._fork(directory, rate, steps, time.monotonic() - begun, why)

    def _settings(self, directory: Path, rate: float, steps: int) -> dict[str, Any]:
        """The configuration as it is, but for what makes it this fork."""
        made: dict[str, Any] = json.loads(to_json(self.config))
        for section in (made, made["trainer"], made["orchestrator"], made["inference"] or {}):
            section |= {name: None for name in TRACKER_FOLDERS if name in section}
            if isinstance(section.get("ckpt"), dict):
                section["ckpt"] |= {"interval": _NEVER, "store": None, "resume_step": None}
            section |= {"output_dir": str(directory)} if "output_dir" in section else {}
            section |= {"max_steps": self.origin.step + steps} if "max_steps" in section else {}
        made["orchestrator"] |= {"eval": None, "val": None}
        made["trainer"]["optim"]["lr"] = rate
        if made["max_steps"] != self.config.max_steps:  # a part of the run: where it falls is not reached
            made["trainer"]["scheduler"] = {"type": "constant"}
        made["trainer"]["trained"]["keep"] = None
        return made

    def drop_weights(self, fork: Fork) -> None:
        """Delete the weights and checkpoints of a fork: its records are what it was made for."""
        for name in ("weights", "checkpoints"):
            for path in step_directories(fork.directory / name).values():
                remove_directory(path)

    def _fork(self, directory: Path, rate: float, steps: int, seconds: float, why: str) -> Fork:
        points = [] if why else [p for p in points_of(runs.open(directory)) if p.step >= self.origin.step]
        if not why and len(points) < steps:
            why = f"it played {len(points)} of {steps} steps"
        took = points[-1].seconds - points[0].seconds if points else math.nan
        return Fork(
            rate=rate,
            directory=directory,
            seconds=seconds,
            step_seconds=took / max(1, len(points) - 1),
            rewards=[[one for rewards in point.rewards.values() for one in rewards] for point in points],
            why=why,
        )


def _carry_out(argv: list[str], log: Path, seconds: float) -> str:
    """Run a command to its end; what went wrong, "" for nothing."""
    with log.open("wb") as out:
        try:
            child = ChildProcess(argv, stdout=out, stderr=out, guarded=True)
        except OSError as error:
            raise RunError(f"A fork cannot be started: {error}") from None
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.end(_END_SECONDS, session=False)
            return "the time was up"
        except BaseException:
            child.end(_END_SECONDS, session=False)
            raise
    if code == 0:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"exit code {code}: {' '.join(lines[-_LAST_LINES:])}"
