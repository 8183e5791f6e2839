"""`buckeye env play`: run rollouts with a person, random actions or a model, and show them in full."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from buckeye.base.terminal import status_line
from buckeye.cli.env_options import VariablesOption, variable_names
from buckeye.errors import RunError, UsageError
from buckeye.evaluation.environment_args import (
    ApiKeyVarOption,
    ArgOption,
    ArgsOption,
    BaseUrlOption,
    environment_args,
)

if TYPE_CHECKING:
    from buckeye.config.environments import EnvConfig
    from buckeye.envs.base import Task
    from buckeye.orchestrator.environments import NamedEnvironment


def play(
    env: Annotated[
        str, typer.Argument(metavar="ENV", help="NAME, OWNER/NAME[@VERSION], a path, or a file of rl init.")
    ],
    task: Annotated[
        str, typer.Option(metavar="N|ID", help="Which task: its number from 1, or its id.")
    ] = "1",
    policy: Annotated[
        str | None,
        typer.Option(metavar="random|MODEL", help="Who plays. Default: you. With --base-url any name."),
    ] = None,
    dataset: Annotated[
        str, typer.Option(metavar="TASKS", help="The tasks of a configuration of rl init.")
    ] = "tasks.json",
    arg: ArgOption = None,
    args: ArgsOption = None,
    variables: VariablesOption = None,
    split: Annotated[str | None, typer.Option(help="Whose tasks. Default: train, else eval.")] = None,
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, help="Rollouts; the next tasks follow, and begin again.")
    ] = 1,
    at_once: Annotated[
        int, typer.Option(metavar="N", min=1, help="Rollouts side by side, unless a person plays.")
    ] = 4,
    base_url: BaseUrlOption = None,
    api_key_var: ApiKeyVarOption = "OPENAI_API_KEY",
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Of a model; 0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="A model's longest reply.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of chance, or of a local model's sampling.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds; a person has all the time.")] = 600.0,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append what is played, as chats for sft.")
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option(metavar="X", help="With --save: only what earns as much.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each rollout.")] = False,
) -> None:
    """Play a task yourself, or watch chance or a model play it: the prompt, the calls, what comes back, the
    reward and why. Exit code 1 if no rollout gets a reward."""
    from buckeye.evaluation.chat_policy import ChatSampling
    from buckeye.evaluation.env_play.session import RANDOM_POLICY, ChatFile, PlaySession
    from buckeye.launch.mcp_gateways import local_gateway

    if base_url is not None and policy in (None, RANDOM_POLICY):
        raise UsageError("--base-url serves a model: name it with --policy")
    if min_reward is not None and save is None:
        raise UsageError("--min-reward chooses what --save keeps: name a file with --save")
    played = _played(env, dataset, environment_args(arg, args), variable_names(variables))
    session = PlaySession(
        policy=policy,
        base_url=base_url,
        api_key_var=api_key_var,
        sampling=ChatSampling(
            temperature=temperature, max_tokens=max_tokens, seed=seed if base_url is None else None
        ),
        seed=seed,
        at_once=at_once,
        timeout=math.inf if policy is None else timeout,
        as_json=as_json,
        chats=None if save is None else ChatFile(save, min_reward),
    )
    with (
        tempfile.TemporaryDirectory(prefix="buckeye-play-") as folder,
        local_gateway([played], Path(folder, "gateway.log"), rollouts=at_once),
    ):
        with status_line(f"loading {env}"):
            named, tasks, first = _tasks(played, split, task, timeout)
        outcomes = asyncio.run(session.play(named, tasks, range(first, first + count)))
    if session.chats is not None:
        typer.echo(f"{session.chats.kept} of {count} chats were added to {save}", err=True)
    if all(outcome.reward is None for outcome in outcomes):
        raise RunError(f"no rollout got a reward: {outcomes[0].error}")


def _played(env: str, dataset: str, args: dict[str, object], variables: Sequence[str]) -> EnvConfig:
    """Return the settings of the environment; for a configuration of `rl init`, of the one that reads it."""
    from buckeye.base.keys import check_variables
    from buckeye.config.environments import EnvConfig
    from buckeye.envs.registry import current_arguments
    from buckeye.mcp.environment import NAME, load_environment

    name = env
    if env.endswith((".yaml", ".yml")):
        name, args = (
            NAME,
            {"config_path": env, "dataset": dataset, **current_arguments(load_environment, args)},
        )
    check_variables(name, variables)
    return EnvConfig(id=name, args=args, variables=list(variables))


def _tasks(
    played: EnvConfig, split: str | None, chosen: str, timeout: float
) -> tuple[NamedEnvironment, Sequence[Task], int]:
    """Return the environment, its tasks, and the index of the chosen task."""
    from buckeye.envs.base import split_names
    from buckeye.orchestrator.environments import load_environments, load_split

    (named,) = load_environments([played], rollout_timeout=timeout)
    tasks = load_split(named, split or split_names(named.environment)[0])
    if chosen.isdigit() and 1 <= int(chosen) <= len(tasks):
        return named, tasks, int(chosen) - 1
    index = next((i for i in range(len(tasks)) if tasks[i].id == chosen), None)
    if index is None:
        raise UsageError(f"--task {chosen}: there is no such id; numbers go from 1 to {len(tasks)}")
    return named, tasks, index


COMMANDS = {"env play": play}
