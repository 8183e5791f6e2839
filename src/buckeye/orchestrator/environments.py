"""Environments of a run: load them from the configuration, check them, and choose their splits."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from buckeye.base.columns import counted
from buckeye.base.keys import check_variables
from buckeye.base.process_guard import GUARD
from buckeye.config.environments import EnvConfig, TrainEnvConfig
from buckeye.dataset.environment import NAME as DATASET
from buckeye.envs.base import TRAIN, Environment, Message, Task, required_tasks, tasks_of
from buckeye.envs.settings import WorkerSettings, read_placement
from buckeye.errors import UsageError
from buckeye.inference.render import ChatRenderer
from buckeye.mcp.environment import NAME as MCP
from buckeye.monitor.intervals import wilson_interval
from buckeye.monitor.log import SAMPLE
from buckeye.orchestrator.rate_limits import Admission
from buckeye.workers.loading import open_environment

log = logging.getLogger(__name__)

HELD_OUT = "eval"
"""Split for evaluation. Training does not use its tasks."""
_GIGABYTE = 10**9
_SAMPLE = 32  # number of prompts to count
_MAX_COMPARED = 2000  # tasks
_MIN_HELD_OUT = 20  # tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings:
    """Settings of one environment that override the settings of the run. None: no override.

    `group_size` is the number of rollouts per task, `max_tokens` the limit per reply, and `timeout` the
    seconds per rollout.
    """

    group_size: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    timeout: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedEnvironment:
    """Environment of the run, with the name that logs and metrics use. `ratio` is its share of the groups."""

    name: str
    environment: Environment
    ratio: float = 1.0
    rollout_settings: RolloutSettings = RolloutSettings()
    admission: Admission = field(default_factory=Admission)


def default_environment_name(env_id: str) -> str:
    """Return the default name of an environment: `name` for `owner/name@version`, and for `folder/name/`."""
    return env_id.partition("@")[0].rstrip("/").rpartition("/")[2].removesuffix(".py")


def load_environments(
    settings: Sequence[EnvConfig], *, rollout_timeout: float = 600.0, log_dir: Path | None = None
) -> list[NamedEnvironment]:
    """Load the environments of a configuration.

    `rollout_timeout` (seconds) is the default for environments that do not set it. Workers write their output
    to `log_dir`. Programs that an environment starts end with this process. Raise `UsageError` if two
    environments have the same name, or if an environment variable that one requires is not set.
    """
    names = environment_names(settings)
    GUARD.mark_children()
    return [
        NamedEnvironment(
            name=name,
            environment=open_environment(s.id, s.args, worker_settings(s, name, rollout_timeout, log_dir)),
            ratio=s.ratio if isinstance(s, TrainEnvConfig) else 1.0,
            rollout_settings=RolloutSettings(
                group_size=s.rollouts_per_example if isinstance(s, TrainEnvConfig) else None,
                temperature=s.sampling.temperature,
                max_tokens=s.sampling.max_tokens,
                timeout=s.rollout_timeout,
            ),
            admission=Admission(max_concurrent=s.max_concurrent, rate_limit=s.rate_limit),
        )
        for name, s in zip(names, settings, strict=True)
    ]


def environment_names(settings: Sequence[EnvConfig]) -> list[str]:
    """Return the names of the environments.

    Raise `UsageError` if an environment has no id, if two have the same name, if a name cannot be that of a
    file, or if an environment variable that one requires is not set.
    """
    if not all(s.id for s in settings):
        raise UsageError(
            "an environment has no `id`" if any(s.id for s in settings) else "no environment is set",
            code="BK-CONFIG-MISSING",
            hint="set `id` in [[orchestrator.env]] ([[env]] for an orchestrator or an evaluation), or "
            "pass --orchestrator.env.0.id NAME. `buckeye env list` lists the installed environments",
        )
    names = [s.name or default_environment_name(s.id) for s in settings]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise UsageError(
            f"two environments have the name {duplicates[0]!r}",
            code="BK-CONFIG-CONFLICT",
            hint="set a different `name` in each [[env]]",
        )
    for name, s in zip(names, settings, strict=True):
        if "/" in name:
            raise UsageError(
                f"the environment {s.id} has the name {name!r}",
                code="BK-CONFIG-VALUE",
                hint="set a `name` without a slash: the files of its evaluations have this name",
            )
        check_variables(name, s.variables)
    return names


def few_tasks_warning(name: str, env_id: str, count: int) -> str | None:
    """Return a warning if an environment has too few held-out tasks for a useful interval, else None."""
    if count >= _MIN_HELD_OUT:
        return None
    low, high = wilson_interval(count / 2, count)
    more = "; name more with --eval-dataset FILE" if env_id == DATASET else ""
    return (
        f"{name} has {counted(count, 'held-out task')}: the 95 % interval of an evaluation is up to "
        f"{high - low:.2f} wide, so most improvements stay within it; use at least {_MIN_HELD_OUT}{more}"
    )


def check_command(env: EnvConfig) -> str:
    """Return the command that checks an environment, with its arguments."""
    args, words = dict(env.args), ["buckeye", "env", "check"]
    if env.id == DATASET:
        rewards = args.pop("reward", ())
        words += ["--dataset", str(args.pop("path", ""))]
        for reward in [rewards] if isinstance(rewards, str) else rewards:
            words += ["--reward", str(reward)]
    elif env.id == MCP:
        words += [str(args.pop("config_path", "")), "--dataset", str(args.pop("dataset", ""))]
    else:
        words.append(env.id)
    args = {name: value for name, value in args.items() if value is not None}
    words += ["--args", json.dumps(args)] if args else []
    return shlex.join([*words, *(["--variables", ",".join(env.variables)] if env.variables else [])])


async def check_environments(environments: Sequence[NamedEnvironment]) -> None:
    """Run the checks that environments define, and log the results.

    `check_isolation` tests if rollouts affect each other. `baseline_report` has the reward of empty replies.
    Raise `UsageError` if rollouts affect each other and the environment does not allow this.
    """
    for env in environments:
        for name, level in (("check_isolation", logging.INFO), ("baseline_report", SAMPLE)):
            check: Callable[[], Awaitable[str]] | None = getattr(env.environment, name, None)
            if check is not None:
                log.log(level, "%s: %s", env.name, await check())


def worker_settings(
    settings: EnvConfig, name: str, rollout_timeout: float, log_dir: Path | None
) -> WorkerSettings:
    """Return the settings for the workers of an environment.

    The limits of turns, tokens and memory, `variables`, and placement on nodes need worker processes. Each of
    these settings therefore implies `isolation = "process"`.
    """
    has_limits = settings.max_turns is not None or settings.max_tokens is not None or settings.variables
    memory, placement = settings.max_memory_gb, read_placement(name)
    return WorkerSettings(
        isolation="process" if has_limits or placement or memory is not None else settings.isolation,
        python=settings.python,
        processes=settings.workers * max(1, len(placement.get("nodes", ()))),
        **placement,
        variables=tuple(settings.variables),
        max_memory_bytes=None if memory is None else int(memory * _GIGABYTE),
        sampling=settings.sampling.model_dump(exclude_none=True),
        max_turns=settings.max_turns,
        max_tokens=settings.max_tokens,
        rollout_timeout=settings.rollout_timeout or rollout_timeout,
        log_dir=log_dir,
        log_name=f"environment-{name}",
    )


def prompt_lengths(tasks: Sequence[Task], renderer: ChatRenderer) -> list[int]:
    """Return the number of tokens of the first prompt of the first `_SAMPLE` tasks.

    An environment may add tokens to a prompt. Prompts that the chat template rejects are left out.
    """
    lengths = []
    for messages in get_first_prompts(tasks):
        with suppress(UsageError):
            lengths.append(len(renderer.render(messages).ids))
    return lengths


def get_first_prompts(tasks: Sequence[Task]) -> list[Sequence[Message]]:
    """Return the messages of the first `_SAMPLE` tasks. Tasks without messages are left out."""
    prompts = (tasks[index].messages for index in range(min(_SAMPLE, len(tasks))))
    return [messages for messages in prompts if messages]


def choose_evaluation_split(env: NamedEnvironment, requested: str | None) -> str:
    """Return the requested split, else `eval` if it exists, else `train`. `verifiers` does this too."""
    if requested is not None:
        return requested
    try:
        tasks_of(env.environment, HELD_OUT)
    except KeyError:
        return TRAIN
    return HELD_OUT


def fallback_note(env: NamedEnvironment, requested: str | None) -> str | None:
    """Return a note if the evaluation uses train tasks because the split `eval` does not exist, else None."""
    if requested is not None or choose_evaluation_split(env, None) == HELD_OUT:
        return None
    return f"{env.name} has no split {HELD_OUT!r}: evaluating on its train tasks; set `split` to change this"


def load_split(env: NamedEnvironment, split: str) -> Sequence[Task]:
    """Return the tasks of a split.

    Raise `UsageError` if the split does not exist or is empty, or if two different tasks have one id.
    """
    tasks = required_tasks(env.environment, split, name=env.name)
    known = dict[str, int]()
    for index in range(min(_MAX_COMPARED, len(tasks))):
        other = known.setdefault(tasks[index].id, index)
        if other != index and tasks[other] != tasks[index]:  # equal tasks are only repeated
            raise UsageError(
                f"environment {env.name}: the tasks {other} and {index} of its split {split!r} differ, but "
                f"have the same id: {tasks[index].id!r}",
                code="BK-ENV-TASKS",
                hint="give each task its own id, for example its row number",
            )
    return tasks
