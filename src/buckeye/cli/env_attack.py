"""`buckeye env attack`: search for replies that are rewarded without the task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from buckeye.cli.env_options import (
    AnswerColumnOption,
    DatasetOption,
    EnvironmentArgument,
    PromptColumnOption,
    RewardOption,
    VariablesOption,
    column_arguments,
    parse_seconds,
    started_environment,
)
from buckeye.evaluation.environment_args import ArgOption, ArgsOption, environment_args


def env_attack(
    env_id: EnvironmentArgument = None,
    dataset: DatasetOption = None,
    reward: RewardOption = None,
    prompt_column: PromptColumnOption = None,
    answer_column: AnswerColumnOption = None,
    arg: ArgOption = None,
    args: ArgsOption = None,
    variables: VariablesOption = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Time, such as 90s, 10m or 1h.")] = "10m",
    max_gradings: Annotated[int, typer.Option(min=1, help="Maximum number of gradings.")] = 100_000,
    sample: Annotated[int, typer.Option(min=10, help="Number of tasks. Most are held out.")] = 500,
    min_gain: Annotated[
        float, typer.Option(min=0.0, help="Report texts with more reward than a guess plus this.")
    ] = 0.03,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write probes for `buckeye env check --probes FILE`.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the tasks and of the policies.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Search for replies that are rewarded without the task, by known tricks and by reinforcement learning.

    The exit code is 1 if an exploit is found.
    """
    import asyncio

    from buckeye.base.storage import write_file
    from buckeye.envs.settings import with_variables
    from buckeye.evaluation.attack.report import AttackOptions
    from buckeye.evaluation.attack.search import attack_environment
    from buckeye.workers.loading import open_environment

    given = environment_args(arg, args) | column_arguments(reward, prompt_column, answer_column)
    with started_environment(env_id, dataset, reward, given, variables) as (config, progress):
        options = AttackOptions(
            budget=parse_seconds(budget),
            max_gradings=max_gradings,
            tasks=sample,
            min_gain=min_gain,
            seed=seed,
            progress=progress,
        )
        environment = open_environment(config.id, config.args, with_variables(config.variables))
        report = asyncio.run(attack_environment(environment, options))
    typer.echo(json.dumps(report.to_json(), ensure_ascii=False) if as_json else report.text())
    if out is not None:
        write_file(out, json.dumps({"probes": report.probes()}, indent=1))
    if report.interrupted or report.exploits:
        raise typer.Exit(130 if report.interrupted else 1)
