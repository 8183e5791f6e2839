"""`buckeye env check`: check that the rewards of an environment are reliable."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from buckeye.base.terminal import status_line
from buckeye.cli.env_options import (
    AnswerColumnOption,
    DatasetOption,
    EnvironmentArgument,
    PromptColumnOption,
    RewardOption,
    VariablesOption,
    column_arguments,
    environment_config,
)
from buckeye.evaluation.environment_args import ArgOption, ArgsOption, environment_args


def env_check(
    env_id: EnvironmentArgument = None,
    dataset: DatasetOption = None,
    reward: RewardOption = None,
    prompt_column: PromptColumnOption = None,
    answer_column: AnswerColumnOption = None,
    arg: ArgOption = None,
    args: ArgsOption = None,
    variables: VariablesOption = None,
    budget: Annotated[
        float, typer.Option(min=1.0, help="Seconds for all rollouts. Checks that do not fit are reported.")
    ] = 60.0,
    sample: Annotated[
        int, typer.Option(min=1, help="Maximum number of tasks per split and `family` in the tasks' data.")
    ] = 300,
    max_content_free: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Limit for policies that ignore the question: reward minus reward of guessing.",
        ),
    ] = 0.03,
    probes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="More probes, from `buckeye env attack --out`.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sample and of the policies.")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 also for warnings.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check the tasks, splits and rewards of an environment, without a model.

    The exit code is 1 if a check fails.
    """
    import asyncio

    from buckeye.evaluation.env_check import CheckOptions, check_environment
    from buckeye.launch.mcp_gateways import DEFAULT_ROLLOUTS, local_gateway

    given = environment_args(arg, args) | column_arguments(reward, prompt_column, answer_column)
    environment = environment_config(env_id, dataset, reward, given, variables)
    with (
        tempfile.TemporaryDirectory(prefix="buckeye-check-") as folder,
        status_line(f"loading {env_id or dataset}") as progress,
        local_gateway([environment], Path(folder, "gateway.log"), rollouts=DEFAULT_ROLLOUTS),
    ):
        options = CheckOptions(
            sample=sample,
            seed=seed,
            limit=max_content_free,
            budget=budget,
            probes=probes,
            variables=tuple(environment.variables),
            progress=progress,
        )
        report = asyncio.run(check_environment(environment.id, environment.args, options))
    if as_json:
        typer.echo(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        from buckeye.evaluation.checks.report_tables import report_text

        typer.echo(report_text(report))
    if not report.passed or (strict and report.counts["warning"]):
        raise typer.Exit(1)


COMMANDS = {"env check": env_check}
