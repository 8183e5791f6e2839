"""Arguments, options and tables that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from buckeye.base.columns import align_columns

if TYPE_CHECKING:
    from buckeye.config.environments import EnvConfig


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows on stdout, under a header, in aligned columns."""
    print(align_columns([header, *rows]))


RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Run directory, name or id. Default: ./outputs, or the newest run."),
]
"""An existing run that may be left out."""

VariablesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--variables",
        metavar="NAME",
        help="Variable to pass to the environment, from this shell or .env; also A,B.",
    ),
]


DatasetOption = Annotated[
    str | None,
    typer.Option(metavar="TASKS", help="Tasks of an MCP environment. With a file of `rl init`: tasks.json."),
]


def variable_names(options: Sequence[str] | None) -> list[str]:
    """Return the names in all `--variables` options."""
    return [name.strip() for names in options or () for name in names.split(",") if name.strip()]


def is_mcp_file(env: str) -> bool:
    """Return True if a command names a configuration of `rl init`."""
    return env.endswith((".yaml", ".yml"))


def environment_config(
    env: str, dataset: str | None, args: dict[str, object], variables: Sequence[str]
) -> EnvConfig:
    """Return the settings of an environment; a file of `rl init` is an argument of the MCP environment."""
    from buckeye.base.keys import check_variables
    from buckeye.config.environments import EnvConfig
    from buckeye.envs.registry import current_arguments
    from buckeye.mcp.environment import NAME, load_environment

    name = env
    if is_mcp_file(env):
        name, args = (
            NAME,
            {"config_path": env, "dataset": "tasks.json", **current_arguments(load_environment, args)},
        )
    if dataset is not None:
        args["dataset"] = dataset
    check_variables(name, variables)
    return EnvConfig(id=name, args=args, variables=list(variables))
