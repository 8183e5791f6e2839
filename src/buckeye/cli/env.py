"""`buckeye env new` and `buckeye env trust`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from buckeye.envs.project_templates import create_project
from buckeye.mcp.tasks.trust import ask_for_trust, is_third_party


def env_new(
    name: Annotated[str, typer.Argument(help="Small letters, digits and hyphens, as my-game.")],
    kind: Annotated[str, typer.Option(help="mcp: tools behind an MCP server; python: a class.")] = "mcp",
    folder: Annotated[Path | None, typer.Option("--dir", help="Where to; must not exist yet.")] = None,
) -> None:
    """Write a new environment that works: a project with tasks, tests, and something to change."""
    place = folder or Path(name)
    for path in create_project(name, kind, place):
        typer.echo(str(path))
    typer.echo(f"Next: read {place / 'README.md'}", err=True)


def env_trust(
    dataset: Annotated[str, typer.Argument(metavar="ORG/NAME", help="A dataset of the Hugging Face hub.")],
    yes: Annotated[bool, typer.Option("--yes", help="Allow it without a question.")] = False,
) -> None:
    """Show the programs, images, addresses and variables that a dataset's tasks use, and allow them."""
    if not is_third_party(dataset):
        print(f"{dataset} is of this project: nobody has to allow it.", file=sys.stderr)
    ask_for_trust(dataset, yes=yes)


COMMANDS = {"env new": env_new, "env trust": env_trust}
