"""`buckeye auth`: show which keys are set and where, and store one."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from buckeye.base.keys import key_files, key_states, set_key
from buckeye.cli.env_options import print_table
from buckeye.errors import UsageError


def auth_status(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the keys: where Buckeye finds each one, and the first and last characters of its value.

    Buckeye searches, in this order: the environment, `.env` of the project, `~/.buckeye/.env`.
    """
    states = key_states()
    if as_json:
        files = [str(path) for path in key_files()]
        typer.echo(json.dumps({"files": files, "keys": [asdict(state) for state in states]}))
        return
    print_table(
        ("name", "found in", "value", "for"),
        [(state.name, state.where or "not set", state.masked or "", state.purpose) for state in states],
    )


def auth_set(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as HF_TOKEN or WANDB_API_KEY.")],
    value: Annotated[str | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Store a key for all projects of this user, in `~/.buckeye/.env`.

    Prompts for the value, or reads it from a pipe. A value in the command would be visible to other users.
    """
    if value is not None or "=" in name:
        raise UsageError(
            "the command contains the value of the key, which other users of this machine can read",
            code="BK-CLI-ARGUMENT",
            hint="Type the value at the prompt, and replace the key if it is a real one\n"
            f"  buckeye auth set {name.partition('=')[0]}",
        )
    path = set_key(name, _read_value(name))
    typer.echo(f"{path}: {name} is set")
    state = next((state for state in key_states() if state.name == name), None)
    if state is not None and state.where != str(path):
        typer.echo(f"warning: {name} is also set in {state.where}, which has precedence here", err=True)


def _read_value(name: str) -> str:
    if sys.stdin.isatty():
        return str(typer.prompt(name, hide_input=True)).strip()
    return sys.stdin.read().strip()
