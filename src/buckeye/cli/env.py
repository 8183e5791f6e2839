"""`buckeye env`: what an environment's rewards are worth."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from buckeye.cli.env_args import Variables, environment_args, variable_names
from buckeye.cli.pages import Commands
from buckeye.cli.waiting import status_line

if TYPE_CHECKING:
    from buckeye.config.environments import EnvConfig
    from buckeye.envs.check import CheckOptions, Report

env_app = Commands(
    help="Environments: write one, see what its rewards are worth, share it, use those of others.",
    no_args_is_help=True,
)


@env_app.command("check")
def env_check(
    env_id: Annotated[str, typer.Argument(metavar="ID", help="NAME, OWNER/NAME[@VERSION], or a path.")],
    arg: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="NAME=VALUE", help="An environment argument: JSON, a,b,c or text."),
    ] = None,
    args: Annotated[str | None, typer.Option(metavar="JSON", help="Environment arguments as JSON.")] = None,
    variables: Variables = None,
    model: Annotated[
        str | None, typer.Option(help="Also play groups with this model: a directory or a hub name.")
    ] = None,
    groups: Annotated[int, typer.Option(min=1, help="Groups of 8 rollouts that the model plays.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest reply of the model.")] = 512,
    budget: Annotated[
        float, typer.Option(min=1.0, help="Seconds for playing; what they were too few for is said.")
    ] = 60.0,
    sample: Annotated[
        int, typer.Option(min=1, help="At most so many tasks of each family and split are played.")
    ] = 300,
    max_content_free: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="What a policy without content may earn above chance.")
    ] = 0.03,
    seed: Annotated[int, typer.Option(help="Seed of the sample and of the policies.")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings end with 1 too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Play probes and policies without content, and check tasks, splits and grades; an error ends with 1."""
    import asyncio

    from buckeye.config.environments import EnvConfig
    from buckeye.envs.check import CheckOptions
    from buckeye.envs.gateway.settings import DEFAULT_SESSIONS
    from buckeye.envs.honesty.result import count_of
    from buckeye.run.gateway import gateway_here
    from buckeye.tasks.keys import check_variables

    played = EnvConfig(id=env_id, args=environment_args(arg or [], args), variables=variable_names(variables))
    check_variables(played.id, played.variables)
    with (
        tempfile.TemporaryDirectory(prefix="buckeye-check-") as folder,
        status_line("loading") as progress,
        gateway_here([played], Path(folder, "gateway.log"), rollouts=DEFAULT_SESSIONS),
    ):
        options = CheckOptions(
            sample=sample,
            seed=seed,
            limit=max_content_free,
            budget=budget,
            variables=tuple(played.variables),
            progress=progress,
        )
        report = asyncio.run(_check(played, options, model, groups, max_tokens))
    if as_json:
        typer.echo(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        from buckeye.cli.env_tables import print_report

        print_report(report)
    if not report.passed or (strict and count_of(report.checks, "warning")):
        raise typer.Exit(1)


@env_app.command("new")
def env_new(
    name: Annotated[str, typer.Argument(help="Small letters, digits and hyphens, as my-game.")],
    kind: Annotated[str, typer.Option(help="mcp: tools behind an MCP server; python: a class.")] = "mcp",
    folder: Annotated[Path | None, typer.Option("--dir", help="Where to; must not exist yet.")] = None,
) -> None:
    """Write a new environment that works: a project with tasks, tests, and something to change."""
    from buckeye.envs.template import new_environment

    place = folder or Path(name)
    for path in new_environment(name, kind, place):
        typer.echo(str(path))
    typer.echo(f"Next: read {place / 'README.md'}", err=True)


async def _check(
    played: EnvConfig,
    options: CheckOptions,
    model: str | None,
    groups: int,
    max_tokens: int,
) -> Report:
    from buckeye.envs.check import check_environment
    from buckeye.run.env_check import check_spread, play_groups, spread_not_run

    report = await check_environment(played.id, played.args, options)
    spread = spread_not_run()
    if model is not None:
        options.progress(f"playing {groups} groups with {model}")
        spread = check_spread(
            await play_groups(played, model=model, groups=groups, max_tokens=max_tokens, seed=options.seed),
            model,
        )
    return replace(report, checks=[*report.checks, spread])
