"""Tasks of an evaluation that the model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from buckeye.base.storage import read_json
from buckeye.dataset.environment import NAME as DATASET
from buckeye.dataset.prompt_tasks import prompt_hash
from buckeye.dataset.prompts import load_prompts
from buckeye.dataset.rows import EVAL, TRAIN
from buckeye.envs.base import Task
from buckeye.envs.registry import CALLER, CALLER_FILE
from buckeye.errors import UsageError
from buckeye.run_files.record import read_record
from buckeye.runs.reader import Run


def training_note(model: str, tasks: Sequence[Task]) -> str | None:
    """Return a note if `model` is in the directory of a run that has these prompts in its training data.

    If the run can no longer read its training data, the note says so.
    """
    folders = Path(model).resolve().parents[:2] if Path(model).is_dir() else ()  # RUN/weights/step_N
    run = next((folder for folder in folders if (folder / "configs" / "rl.json").is_file()), None)
    if run is None:
        return None
    try:
        trained = {
            prompt_hash(task)
            for environment in Run(run).setting("orchestrator.env") or ()
            for task in _training_tasks(environment, run)
        }
    except UsageError as error:
        return f"training tasks are not counted, because the data of {run} cannot be read: {error.message}"
    count = sum(prompt_hash(task) in trained for task in tasks)
    if not count:
        return None
    return (
        f"{count} of {len(tasks)} tasks are training tasks of {run}; its held-out tasks are the split {EVAL}"
    )


def _training_tasks(environment: Mapping[str, Any], run: Path) -> Sequence[Task]:
    """Return the training tasks of an environment of a run; none if it is not a dataset with a reward."""
    args = environment["args"]
    if environment["id"] == DATASET:
        folder = Path(read_record(run).working_directory)
        paths = (args["path"], args.get("eval_path"))
        data, eval_data = (folder / path if path and (folder / path).exists() else path for path in paths)
    elif environment["id"] == CALLER and (run / CALLER_FILE).exists():
        args = read_json(run / CALLER_FILE)
        data, eval_data = args["dataset"], args["eval_dataset"]
    else:
        return ()
    if data is None:
        return ()
    prompts = load_prompts(
        data,
        eval_dataset=eval_data,
        split=args.get("split"),
        prompt_column=args.get("prompt_column"),
        answer_column=args.get("answer_column"),
    )
    return prompts.splits[TRAIN]
