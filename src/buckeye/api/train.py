"""`buckeye.train` and `buckeye.evaluate`."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from buckeye.api.environment import EnvironmentArguments, Rewards, flatten_settings, rows_of
from buckeye.api.errors import with_python_errors
from buckeye.api.run import TrainingRun
from buckeye.cli.composed_run import choose_output_directory
from buckeye.dataset.environment import evaluation_rows
from buckeye.dataset.prompts import Dataset
from buckeye.envs.registry import CALLER
from buckeye.errors import UsageError
from buckeye.evaluation.chat_policy import ChatSampling
from buckeye.evaluation.run_eval import EvalReport, EvalRequest, prepare_eval, run_eval
from buckeye.launch.preflight.model import resolve_run
from buckeye.setup.recipe.flags import parse_train_args
from buckeye.workers.loading import CALLER_ENVIRONMENTS

Model = str | Path | TrainingRun
"""A folder, a name on the Hugging Face hub, or a run, which means its newest weights."""


@with_python_errors
def train(
    model: Model,
    *,
    dataset: Dataset | None = None,
    reward: Rewards | None = None,
    env: Any = None,
    reward_weights: Sequence[float] | None = None,
    eval_dataset: Dataset | None = None,
    split: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    output_dir: str | Path | None = None,
    wait: bool = True,
    **settings: Any,
) -> TrainingRun:
    """Train a model on a dataset with a reward, or on an environment; return the run.

    The run is a run of `buckeye rl`: its commands show the run, and Python or the command line can resume it.
    Functions and objects stay in this process. If this process ends, the run stops with a checkpoint.

    Args:
        model: a folder, a name on the Hugging Face hub, or a run that has ended.
        dataset: a file, a folder, a hub id, or rows.
        reward: a function, a file, a built-in reward, or a list of them.
        env: in place of `dataset` and `reward`: an id, a path, or an environment object.
        reward_weights: the weight of each reward; 1 by default.
        eval_dataset: the prompts to evaluate on; by default a tenth of the dataset.
        split: the split of the dataset to train on.
        prompt_column: the column with the prompts.
        answer_column: the column with the answers. Built-in rewards compare replies with the answers. A
            reward function receives the answer of its task as the parameter `answer`.
        output_dir: the run directory; by default a new one in `outputs/`.
        wait: return when the run has ended. If False, the run continues while this process lives.
        settings: settings of the run, with the names of the TOML keys: `max_steps=100`,
            `trainer={"optim": {"lr": 1e-6}}`, or `**{"trainer.optim.lr": 1e-6}`.

    Raises:
        UsageError: for arguments, data or settings that cannot be used.
        RunError: if the run fails.
        KeyboardInterrupt: after Ctrl-C, when the run has stopped with a checkpoint.
    """
    arguments = EnvironmentArguments(
        dataset=rows_of(dataset),
        reward=reward,
        reward_weights=reward_weights,
        eval_dataset=rows_of(eval_dataset),
        split=split,
        prompt_column=prompt_column,
        answer_column=answer_column,
        env=env,
    )
    folder = choose_output_directory(
        None if output_dir is None else Path(os.path.expanduser(output_dir)), arguments.name
    )
    argv = ["--yes", "--model", _model_name(model), *arguments.flags(), "--output-dir", str(folder)]
    argv += flatten_settings(settings)
    parse_train_args(argv).check_composed()
    run = TrainingRun(folder)
    variables: dict[str, str] = {}
    if arguments.is_object:
        environment = arguments.make()
        arguments.save(folder)
        variables |= run.serve(environment)
    run.start(["rl", *argv], Path.cwd(), variables)
    return run.wait() if wait else run


@with_python_errors
def evaluate(
    model: Model,
    *,
    dataset: Dataset | None = None,
    reward: Rewards | None = None,
    env: Any = None,
    reward_weights: Sequence[float] | None = None,
    split: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    examples: int | None = None,
    rollouts: int = 1,
    temperature: float | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    max_concurrent: int = 16,
    output_dir: str | Path | None = None,
) -> EvalReport:
    """Evaluate a model on all rows of a dataset with a reward, or on an environment.

    Args:
        model: a folder, a name on the Hugging Face hub, or a run that has ended.
        dataset: a file, a folder, a hub id, or rows.
        reward: a function, a file, a built-in reward, or a list of them.
        env: in place of `dataset` and `reward`: an id, a path, or an environment object.
        reward_weights: the weight of each reward; 1 by default.
        split: the split to evaluate on. For a dataset: `eval` (the rows that a run holds out), `train` (the
            other rows), or a split of the dataset; by default its split `test` or `validation`, or else all
            rows. For an environment: one of its splits; by default `eval`, or else `train`.
        prompt_column: the column with the prompts.
        answer_column: the column with the answers. Built-in rewards compare replies with the answers. A
            reward function receives the answer of its task as the parameter `answer`.
        examples: the number of tasks; by default all.
        rollouts: the number of rollouts per task.
        temperature: the sampling temperature; 0 is greedy. The default for a model that a run trained
            is the temperature of the run's evaluations. The default for other models is 1.
        max_tokens: the maximum number of tokens of a reply; by default that of the run.
        seed: the seed of sampling.
        max_concurrent: the maximum number of parallel rollouts.
        output_dir: the folder of the results; by default a new one in `outputs/evals/`.

    Raises:
        UsageError: for arguments or data that cannot be used.
        RunError: if no rollout could be scored.
    """
    rows = rows_of(dataset)
    eval_rows, dataset_split, task_split = evaluation_rows(rows, split)
    arguments = EnvironmentArguments(
        dataset=rows,
        reward=reward,
        reward_weights=reward_weights,
        eval_dataset=eval_rows,
        split=dataset_split if dataset is not None else None,
        prompt_column=prompt_column,
        answer_column=answer_column,
        env=env,
    )
    environment = arguments.make() if arguments.is_object else None
    env_id, args = (CALLER, {}) if environment is not None else arguments.id_and_args()
    request = EvalRequest(
        env_id=env_id,
        args=args,
        model=resolve_run(_model_name(model), at="model"),
        split=split if dataset is None else task_split,
        examples=examples,
        rollouts=rollouts,
        sampling=ChatSampling(temperature=temperature, top_p=None, max_tokens=max_tokens, seed=seed),
        seed=seed,
        max_concurrent=max_concurrent,
        output_dir=Path(os.path.expanduser(output_dir)) if output_dir else _new_folder(arguments.name),
    )
    CALLER_ENVIRONMENTS.extend([environment] if environment is not None else [])
    try:
        if not _has_event_loop():
            return run_eval(prepare_eval(request))
        # `run_eval` starts an event loop, which fails in a notebook's thread, because one is running there
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: run_eval(prepare_eval(request))).result()
    finally:
        if environment is not None:
            CALLER_ENVIRONMENTS.remove(environment)


def _has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _model_name(model: Any) -> str:
    if isinstance(model, TrainingRun):
        _ = model.model  # raises UsageError without weights
        return str(model.path)
    if not isinstance(model, str | Path):
        raise UsageError(
            f"model= is a {type(model).__name__}",
            code="BK-CLI-ARGUMENT",
            hint="pass the folder of a model, its name on the Hugging Face hub, or a run",
        )
    return str(model)


def _new_folder(name: str) -> Path:
    folders = (Path("outputs/evals", f"{name}-{number}") for number in itertools.count(1))
    return next(folder for folder in folders if not folder.exists())
