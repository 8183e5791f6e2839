"""The commands of `buckeye` that are offered here, by their words. What they need is imported as they run."""

import sys
from typing import Annotated

import typer

from buckeye.cli.env_image import env_build, env_push
from buckeye.cli.gateway import gateway
from buckeye.cli.hf import hf


def trust(
    dataset: Annotated[str, typer.Argument(metavar="ORG/NAME", help="A dataset of the Hugging Face hub.")],
    yes: Annotated[bool, typer.Option("--yes", help="Allow it without a question.")] = False,
) -> None:
    """Show the programs, images, addresses and variables that a dataset's tasks use, and allow them."""
    from buckeye.mcp.tasks.trust import ask_for_trust, is_of_others

    if not is_of_others(dataset):
        print(f"{dataset} is of this project: nobody has to allow it.", file=sys.stderr)
    ask_for_trust(dataset, yes=yes)


COMMANDS = {"env build": env_build, "env push": env_push, "env trust": trust, "gateway": gateway, "hf": hf}
