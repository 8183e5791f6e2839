"""Environment of a composed run: MCP servers with tasks, a dataset with a reward, or any environment."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.config.config_files import load_json
from buckeye.dataset.environment import NAME as DATASET
from buckeye.dataset.environment import make_environment
from buckeye.dataset.prompts import read_prompts
from buckeye.envs.base import TRAIN, Message, split_names, tasks_of
from buckeye.envs.registry import CALLER, LIBRARIES
from buckeye.envs.settings import WorkerSettings, read_placement
from buckeye.errors import UsageError
from buckeye.mcp.config import DefaultsConfig, GymConfig, load_gym_config
from buckeye.mcp.environment import NAME as MCP
from buckeye.mcp.environment import McpEnvironment
from buckeye.mcp.grading.task_graders import check_task_graders
from buckeye.mcp.tasks.dataset import find_images
from buckeye.mcp.tasks.task_schema import McpTask
from buckeye.mcp.tasks.trust import collect_task_resources, read_taskset
from buckeye.orchestrator.environments import default_environment_name
from buckeye.setup.recipe.flags import TrainFlags
from buckeye.workers.environment import WorkerEnvironment
from buckeye.workers.loading import open_environment

_EVAL = "eval"
_SAMPLE = 256
"""Maximum number of prompts to search for the longest one."""
_REPLY_TOKENS = 128
_THOUGHT_TOKENS = 512
_ANSWER_TOKENS = 256
"""Expected tokens of a reply: with a tool call, with a tool call after thoughts, and without tools."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnvironment:
    """Description of the environment of a composed run, for its plan and its configuration."""

    id: str
    args: Mapping[str, Any]
    name: str
    """Name for trackers."""
    folder: str
    """Name for the run directory."""
    about: str
    """Description in the plan."""
    dataset: str
    """Name of the dataset with the tasks; "" if the environment contains its tasks."""
    tasks: int
    held_out: int
    prompts: Sequence[str]
    """Training prompts as texts, all or a sample."""
    reply_tokens: int
    """Expected length of a reply, in tokens."""
    turns: int | None = 1
    """Maximum number of turns of a rollout; None if unknown."""
    system: str = ""
    """System prompt, which describes the tools."""
    actions: int | None = None
    """Number of tools described; None without tools."""
    images: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    """Resources of this machine that the tasks use, one line for each kind."""


def mcp_environment(file: Path, dataset: str) -> RunEnvironment:
    """Return the environment of a configuration and its tasks. Raises UsageError if no rollout could run."""
    gym = load_gym_config(file)
    tasks, held_out = read_taskset(dataset, check_trust=False)
    if not tasks:
        raise UsageError(
            f"{dataset}: no tasks to train on, all {len(held_out)} are held out",
            code="BK-ENV-TASKS",
            hint="Add tasks to the train split",
        )
    check_task_graders(tasks + held_out, gym, file, [dataset])
    McpEnvironment(gym, {"train": tasks, "eval": held_out})
    return describe_mcp(gym, tasks, held_out, file=file, dataset=dataset)


def describe_mcp(
    gym: GymConfig, tasks: Sequence[McpTask], held_out: Sequence[McpTask], *, file: Path, dataset: str
) -> RunEnvironment:
    """Return the description of an MCP environment."""
    name = str(gym.job.metadata.get("environment") or gym.job.name or file.stem)
    turns = gym.defaults.max_turns
    return RunEnvironment(
        id=MCP,
        args={"dataset": dataset, "config_path": str(file)},
        name=name,
        folder=file.stem,
        about=f"{name} ({file}: {', '.join(gym.actions)})",
        dataset=dataset,
        tasks=len(tasks),
        held_out=len(held_out),
        prompts=[task.prompt for task in tasks],
        reply_tokens=_THOUGHT_TOKENS if gym.parser.use_thinking else _REPLY_TOKENS,
        turns=None if turns == DefaultsConfig().max_turns else turns,
        system=gym.system_prompt,
        actions=len(gym.actions) - 1,
        images=find_images([*tasks, *held_out]),
        uses=tuple(collect_task_resources([*tasks, *held_out]).lines()),
    )


def dataset_environment(flags: TrainFlags) -> RunEnvironment:
    """Return the environment of `--dataset` and `--reward`. Raises UsageError."""
    assert flags.dataset is not None
    options = {
        "split": flags.split,
        "prompt_column": flags.prompt_column,
        "answer_column": flags.answer_column,
    }
    prompts = read_prompts(flags.dataset, eval_source=flags.eval_dataset, **options)
    make_environment(prompts, flags.reward, flags.reward_weights or None)
    args: dict[str, Any] = {"path": flags.dataset, "reward": flags.reward}
    args |= {"reward_weights": flags.reward_weights} if flags.reward_weights else {}
    args |= {"eval_path": flags.eval_dataset} if flags.eval_dataset else {}
    args |= {name: value for name, value in options.items() if value is not None}
    tasks = prompts.splits[TRAIN]
    return RunEnvironment(
        id=DATASET,
        args=args,
        name=Path(flags.dataset).stem,
        folder=Path(flags.dataset).stem,
        about=f"{prompts.summary}; rewards: {', '.join(flags.reward)}",
        dataset=flags.dataset,
        tasks=len(tasks),
        held_out=len(prompts.splits.get(_EVAL, ())),
        prompts=[_text_of(task.messages) for task in tasks.extremes(_SAMPLE)],
        reply_tokens=_ANSWER_TOKENS,
    )


def has_identical_prompts(environment: RunEnvironment) -> bool:
    """Return True if several tasks of one turn have the same prompt. Tools may show more than the prompt."""
    return environment.turns == 1 and environment.tasks > 1 and len(set(environment.prompts)) == 1


def loaded_environment(text: str) -> RunEnvironment:
    """Return the environment of `--env`: an id or a path, and arguments as `ID:name=value,name=value`.

    Loads the environment once, to count its tasks. Raises UsageError.
    """
    env_id, args = parse_environment(text)
    settings = (
        WorkerSettings(isolation="process", **read_placement(env_id))
        if env_id == CALLER
        else WorkerSettings()
    )
    environment = open_environment(env_id, args, settings)
    try:
        splits = split_names(environment)
        tasks = tasks_of(environment, TRAIN) if TRAIN in splits else ()
        if not len(tasks):
            hint = f"Its splits are {', '.join(splits)}; add tasks to the split {TRAIN}"
            raise UsageError(f"{env_id} has no tasks to train on", code="BK-ENV-TASKS", hint=hint)
        turns = getattr(environment, "turns", None)
        held_out = len(tasks_of(environment, _EVAL)) if _EVAL in splits else 0
        count = len(tasks) if turns == 1 else min(_SAMPLE, len(tasks))  # one turn leaves no other room
        sample = [tasks[index] for index in range(count)]
        return RunEnvironment(
            id=env_id,
            args=args,
            name=default_environment_name(env_id),
            folder=default_environment_name(env_id),
            about=text,
            dataset="",
            tasks=len(tasks),
            held_out=held_out,
            prompts=[_text_of(task.messages) for task in sample],
            reply_tokens=_ANSWER_TOKENS,
            turns=turns,
        )
    finally:
        if isinstance(environment, WorkerEnvironment):  # the run starts its own workers
            asyncio.run(environment.close())


def parse_environment(text: str) -> tuple[str, dict[str, Any]]:
    """Return the id and the arguments of `ID` or `ID:name=value,name=value`. Values are JSON, else text.

    The id of an environment of a library may be LIBRARY/MODULE:NAME. Raises UsageError for an argument
    without a value.
    """
    env_id, sign, rest = text.partition(":")
    name, colon, after = rest.partition(":")
    if env_id.partition("/")[0] in LIBRARIES and name and "=" not in name:
        env_id, sign, rest = f"{env_id}:{name}", colon, after
    args: dict[str, Any] = {}
    for part in re.split(r",(?=\s*[A-Za-z_]\w*\s*=)", rest) if sign else ():
        name, equals, value = part.partition("=")
        if not name.strip() or not equals:
            hint = f"Write {env_id}:name=value, or {env_id}:name=value,other=value"
            raise UsageError(f"--env {text}: no argument in {part!r}", code="BK-CLI-ARGUMENT", hint=hint)
        try:
            args[name.strip()] = load_json(value)
        except (ValueError, RecursionError):
            args[name.strip()] = value
    return env_id, args


def _text_of(messages: Sequence[Message]) -> str:
    return "\n".join(str(message.get("content") or "") for message in messages)


def tasks_text(environment: RunEnvironment, *, is_evaluated: bool) -> str:
    """Return the numbers of tasks for the plan."""
    held_out = f"{environment.held_out} held out" if environment.held_out else "none held out"
    held_out += ", without evaluation" if environment.held_out and not is_evaluated else ""
    source = f" ({environment.dataset})" if environment.dataset else ""
    return f"{environment.tasks} to train on, {held_out}{source}"
