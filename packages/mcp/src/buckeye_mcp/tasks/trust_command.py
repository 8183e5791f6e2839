"""`buckeye env trust`: what the tasks of a dataset use, and the permission for it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from buckeye.errors import UsageError


def trust(
    dataset: Annotated[str, typer.Argument(metavar="ORG/NAME", help="A dataset of the Hugging Face hub.")],
    yes: Annotated[bool, typer.Option("--yes", help="Allow it without a question.")] = False,
) -> None:
    """Show the programs, images, addresses and variables that a dataset's tasks use, and allow them."""
    from buckeye_mcp.tasks.trust import is_of_others

    if not is_of_others(dataset):
        print(f"{dataset} is of this project: nobody has to allow it.", file=sys.stderr)
    ask_for_trust(dataset, yes=yes)


def ask_for_trust(dataset: str, *, yes: bool) -> None:
    """Have the user allow what the tasks of a hub use, unless that was done. Raises UsageError if it is not
    allowed, or if nobody can be asked."""
    from buckeye.cli.terminal import ask_text, can_ask
    from buckeye_mcp.tasks.trust import allow, is_of_others, read_taskset, trusted_digests, uses_of

    if not is_of_others(dataset):
        return
    tasks, held_out = read_taskset(dataset, checked=False)
    uses = uses_of([*tasks, *held_out])
    if uses.digest in trusted_digests():
        return
    print(f"The tasks of {dataset} are somebody else's. They use:", file=sys.stderr)
    for line in uses.lines():
        print(f"  {line}", file=sys.stderr)
    if not yes:
        if not can_ask(yes=False, as_json=False):
            raise UsageError(
                f"nobody can be asked whether that is allowed. Say so: buckeye env trust {dataset} --yes"
            )
        if ask_text("Allow it, here and for all runs? Type yes").lower() != "yes":
            raise UsageError(f"{dataset} was not allowed; nothing was started.")
    print(f"Allowed, and noted in {allow(dataset, uses)}", file=sys.stderr)
