"""`buckeye env new` and `buckeye env trust`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from buckeye.envs.project_templates import create_project
from buckeye.mcp.tasks.trust import ask_for_trust, is_third_party


def env_new(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits and hyphens, such as my-game.")],
    kind: Annotated[str, typer.Option(help="mcp: tools of an MCP server; python: a class.")] = "mcp",
    folder: Annotated[Path | None, typer.Option("--dir", help="New folder. Default: NAME.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Create a new environment: a project with example tasks and tests, ready to run and to change."""
    project = folder or Path(name)
    files = [str(path) for path in create_project(name, kind, project)]
    typer.echo(json.dumps({"directory": str(project), "files": files}) if as_json else "\n".join(files))
    typer.echo(f"Next: read {project / 'README.md'}", err=True)


def env_trust(
    dataset: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Dataset on the Hugging Face hub.")],
    yes: Annotated[bool, typer.Option("--yes", help="Trust it without a prompt.")] = False,
) -> None:
    """Show the programs, images, addresses and variables of a dataset's tasks, and ask to trust them."""
    if not is_third_party(dataset):
        print(
            f"{dataset} is local, or in this folder's buckeye.lock.yaml: it needs no trust", file=sys.stderr
        )
    ask_for_trust(dataset, yes=yes)
