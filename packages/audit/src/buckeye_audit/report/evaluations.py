"""Reading the evaluations that `rl` and `evals` wrote."""

from __future__ import annotations

import difflib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from buckeye.base.storage import read_json, step_directories
from buckeye.errors import UsageError
from buckeye.monitor.intervals import cluster_of
from buckeye.orchestrator.environments import short_name
from buckeye.run_files.directory import RUN_FILE

_HOW_TO_EVALUATE = (
    "`rl` writes evaluations if the orchestrator file has an [eval] table. A model that is there already is "
    "measured with `evals`; give the two output directories as --before and --after."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """All rollouts of one task. `rewards` are of those that have one; `misses` counts the right words in a
    wrong spelling, None where the environment does not count them."""

    id: str
    family: str | None
    split: str | None
    cluster: str
    rewards: tuple[float, ...]
    misses: int | None
    truncated: int
    errored: int

    @property
    def passed(self) -> int:
        """Rollouts with a reward of at least 1."""
        return sum(reward >= 1.0 for reward in self.rewards)

    @property
    def exact(self) -> float:
        """The share of the scored rollouts that passed."""
        return self.passed / len(self.rewards)

    @property
    def played(self) -> int:
        return len(self.rewards) + self.errored


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One evaluation of one environment. `measured` is what its `.json` says: model, sampling, figures."""

    file: Path
    measured: Mapping[str, Any]
    tasks: Mapping[str, TaskResult]

    @property
    def step(self) -> int | None:
        """The policy version of a run, None for a model by itself."""
        return self.measured.get("step")

    @property
    def label(self) -> str:
        """What was measured, for people."""
        model = self.measured.get("model", "an unknown model")
        return str(model) if self.step is None else f"step {self.step} of {model}"


def evaluations_of_run(run: Path, env_id: str) -> list[Evaluation]:
    """All evaluations of an environment in an `rl` run, the lowest step first; those that a resumed run took
    back are left out. Raises UsageError if there are none."""
    if not run.is_dir():
        raise UsageError(f"--run: there is no directory {run}")
    folders = step_directories(run / "evals")
    if not folders:
        raise UsageError(f"--run: {run} holds no evaluations (evals/step_N). {_HOW_TO_EVALUATE}")
    names = {name: record for folder in folders.values() for name, record in _summaries(folder).items()}
    name = _matching(names, env_id, run)
    resumed = _resumed_steps(run)
    found = [read_evaluation(f, name) for f in folders.values() if (f / f"{name}.jsonl").is_file()]
    kept = [e for e in found if not _taken_back(e, resumed)]
    if not kept:
        raise UsageError(
            f"--run: all evaluations in {run} are of steps that a --resume took back. Go on with the run."
        )
    return kept


def evaluation_in(directory: Path, env_id: str, flag: str) -> Evaluation:
    """The evaluation that `evals --output-dir DIRECTORY` wrote. Raises UsageError if there is none."""
    for folder in (directory / "evals", directory):
        names = _summaries(folder)
        if names:
            return read_evaluation(folder, _matching(names, env_id, directory))
    raise UsageError(f"{flag}: {directory} holds no evaluation (evals/NAME.jsonl). {_HOW_TO_EVALUATE}")


def read_evaluation(folder: Path, name: str) -> Evaluation:
    """Read `<name>.json` and `<name>.jsonl`. Raises UsageError naming the line that cannot be read."""
    file = folder / f"{name}.jsonl"
    records: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in _records(file):
        records[record["task_id"]].append(record)
    tasks = {task_id: _task_result(task_id, rollouts) for task_id, rollouts in records.items()}
    if not tasks:
        raise UsageError(f"{file} holds no rollouts: nothing was evaluated there")
    return Evaluation(file=file, measured=_summaries(folder)[name], tasks=tasks)


def _summaries(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Environment name -> the content of its `.json`, for every evaluation that is complete."""
    found: dict[str, Mapping[str, Any]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        summary = file.with_suffix(".json")
        try:
            found[file.stem] = dict(read_json(summary))
            for key in ("step", "attempt"):
                if not isinstance(found[file.stem].get(key, 0), int):
                    raise TypeError(f"`{key}` is a whole number")
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{summary}, which belongs to {file.name}, cannot be read: {error}") from None
    return found


def _matching(names: Mapping[str, Mapping[str, Any]], env_id: str, where: Path) -> str:
    """The name under which an environment was evaluated; `env_id` is its id or that name."""
    if env_id in names:
        return env_id
    wanted = canonicalize_name(short_name(env_id))
    found = [n for n, r in names.items() if canonicalize_name(short_name(str(r.get("id", n)))) == wanted]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            f"{where} has several evaluations of {env_id}: {', '.join(found)}. Give one of these as the id."
        )
    close = difflib.get_close_matches(short_name(env_id), names, 1)
    meant = f" Did you mean {close[0]}?" if close else ""
    raise UsageError(f"{where} has no evaluation of {env_id!r}, but of {', '.join(names)}.{meant}")


def _records(file: Path) -> Iterator[Mapping[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if not isinstance(record["task_id"], str) or not isinstance(record["data"], dict):
                    raise TypeError("`task_id` is text, and `data` a table")
                if not isinstance(record.get("components", {}), dict):
                    raise TypeError("`components` is a table")
                if not all(map(_is_reward, record.get("components", {}).values())):
                    raise TypeError("`components` are finite numbers")
                if not _is_reward(record["reward"]):
                    raise TypeError(f"`reward` is a finite number or null, not {record['reward']!r}")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise UsageError(
                    f"{file}, line {number}, is no evaluated rollout: {type(error).__name__}: {error}"
                ) from None
            yield record


def _is_reward(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) <= sys.float_info.max)


def _task_result(task_id: str, rollouts: list[Mapping[str, Any]]) -> TaskResult:
    data = rollouts[0]["data"]
    components = [record.get("components", {}) for record in rollouts]
    counted = [c["ortho_miss"] for c in components if "ortho_miss" in c]
    return TaskResult(
        id=task_id,
        family=_text(data.get("family")),
        split=_text(data.get("split")),
        cluster=cluster_of(task_id, data),
        rewards=tuple(r["reward"] for r in rollouts if r["reward"] is not None),
        misses=sum(bool(miss) for miss in counted) if counted else None,
        truncated=sum(bool(r.get("truncated")) for r in rollouts),
        errored=sum(r["reward"] is None for r in rollouts),
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _resumed_steps(run: Path) -> dict[int, int]:
    """Attempt of a run -> the step that it was resumed from."""
    try:
        attempts = read_json(run / RUN_FILE)["attempts"]
        return {int(a["attempt"]): int(a["resumed_step"] or 0) for a in attempts}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # an orchestrator that was started by hand keeps no record


def _taken_back(evaluation: Evaluation, resumed: Mapping[int, int]) -> bool:
    """Whether a later attempt went on from an earlier step than the one evaluated."""
    attempt, step = int(evaluation.measured.get("attempt", 0)), evaluation.step or 0
    return any(later > attempt and step > start for later, start in resumed.items())
