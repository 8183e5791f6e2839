"""Tasks of an evaluation that the model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from buckeye.dataset.environment import NAME as DATASET
from buckeye.dataset.prompts import prompt_hash, read_prompts
from buckeye.dataset.rows import EVAL, TRAIN
from buckeye.envs.base import Task
from buckeye.errors import UsageError
from buckeye.run_files.record import read_record
from buckeye.runs.reader import Run

_PATHS = ("path", "eval_path")


def training_note(model: str, tasks: Sequence[Task]) -> str | None:
    """Return a note if `model` is in the directory of a run with these prompts in its training data."""
    folders = Path(model).resolve().parents[:2] if Path(model).is_dir() else ()  # RUN/weights/step_N
    run = next((folder for folder in folders if (folder / "configs" / "rl.json").is_file()), None)
    if run is None:
        return None
    trained = _trained_prompts(run)
    count = sum(prompt_hash(task) in trained for task in tasks)
    if not count:
        return None
    return (
        f"{count} of {len(tasks)} tasks are training tasks of {run}; its held-out tasks are the split {EVAL}"
    )


def _trained_prompts(run: Path) -> set[int]:
    """Return the hashes of the training prompts of a run, without datasets that cannot be read any more."""
    hashes: set[int] = set()
    for environment in Run(run).setting("orchestrator.env") or ():
        if environment["id"] == DATASET:
            with suppress(UsageError):
                folder = Path(read_record(run).working_directory)
                hashes |= {prompt_hash(task) for task in _training_tasks(environment["args"], folder)}
    return hashes


def _training_tasks(args: Mapping[str, Any], folder: Path) -> Sequence[Task]:
    """Return the training tasks of a dataset. Its paths may be relative to `folder`."""
    paths = {name: args[name] for name in _PATHS if args.get(name)}
    paths |= {name: str(folder / path) for name, path in paths.items() if (folder / path).exists()}
    prompts = read_prompts(
        paths["path"],
        split=args.get("split"),
        eval_source=paths.get("eval_path"),
        prompt_column=args.get("prompt_column"),
        answer_column=args.get("answer_column"),
    )
    return prompts.splits[TRAIN]
