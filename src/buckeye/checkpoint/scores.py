"""What evaluations say about the checkpoints of a run, and which of them is the best."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.checkpoint.find import CheckpointInfo
from buckeye.errors import UsageError
from buckeye.storage import read_json, step_directories


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The evaluation of one environment after `step` steps, by the run's `attempt`. `restarts` has the step
    that each attempt up to this one went on from; an attempt that began anew is not in it."""

    environment: str
    step: int
    attempt: int
    mean_reward: float
    rollouts: int
    split: str
    restarts: Mapping[int, int]

    def is_of(self, info: CheckpointInfo) -> bool:
        """Whether the evaluated weights come before or after a checkpoint in one line of training. They do
        not if an attempt between the two went on from before the checkpoint: its step was trained again."""
        between = range(info.attempt + 1, self.attempt + 1)
        return self.attempt >= info.attempt and all(self.restarts.get(a, -1) >= info.step for a in between)


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best checkpoint, its mean reward over all environments, the evaluations that say so, and among how
    many checkpoints it is the best."""

    info: CheckpointInfo
    mean_reward: float
    scores: Sequence[Score]
    of: int


def read_scores(run: Path) -> list[Score]:
    """Every complete evaluation in a run directory, by step. Raises UsageError if one cannot be read."""
    restarts = _restarts(run)
    found = []
    for step, folder in step_directories(run / "evals").items():
        for path in sorted(folder.glob("*.json")):
            if not path.with_suffix(".jsonl").exists():  # written last
                continue
            figures = _figures(path)
            if figures.get("mean_reward") is not None:
                found.append(_score(path, step, figures, restarts))
    return found


def _score(path: Path, step: int, figures: Mapping[str, Any], restarts: Mapping[int, int]) -> Score:
    try:
        return Score(
            environment=path.stem,
            step=step,
            attempt=int(figures.get("attempt", 1)),
            mean_reward=float(figures["mean_reward"]),
            rollouts=int(figures["n"]),
            split=str(figures.get("split", "eval")),
            restarts=restarts,
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"The evaluation {path} cannot be read: {error!r}") from None


def scores_of(info: CheckpointInfo, scores: Sequence[Score]) -> list[Score]:
    """The evaluations of a checkpoint's weights, by environment.

    Those of other weights do not count: of another step, of an attempt before the one that wrote the
    checkpoint, or of a later one that trained its step again.
    """
    found = [s for s in scores if s.step == info.step and s.is_of(info)]
    return sorted(found, key=lambda score: score.environment)


def best_by_reward(checkpoints: Iterable[CheckpointInfo], scores: Sequence[Score]) -> Best | None:
    """The checkpoint with the highest mean reward over all evaluated environments (see `scores_of`), and of
    equals the later one; None if none was evaluated on all of them."""
    measured = [(info, scores_of(info, scores)) for info in checkpoints]
    environments = {s.environment for _, found in measured for s in found}
    complete = [
        Best(info=info, mean_reward=statistics.fmean(s.mean_reward for s in found), scores=found, of=0)
        for info, found in measured
        if found and {s.environment for s in found} == environments
    ]
    if not complete:
        return None
    best = max(complete, key=lambda one: (one.mean_reward, one.info.step))
    return Best(info=best.info, mean_reward=best.mean_reward, scores=best.scores, of=len(complete))


def _restarts(run: Path) -> dict[int, int]:
    """Attempt -> the step that it went on from, of those that did."""
    try:
        attempts = read_json(run / "run.json")["attempts"]
        resumed = {int(each["attempt"]): each["resumed_step"] for each in attempts}
        return {attempt: int(step) for attempt, step in resumed.items() if step is not None}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UsageError(f"{run / 'run.json'} cannot be read: {error!r}") from error


def _figures(path: Path) -> Mapping[str, Any]:
    try:
        figures = read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"The evaluation {path} cannot be read: {error}") from error
    return figures if isinstance(figures, dict) else {}
