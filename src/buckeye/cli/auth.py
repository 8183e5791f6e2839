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
    """Show every key: where it was found, and its ends. Looked up in the environment, then in `.env` of the
    project, then in `~/.buckeye/.env`."""
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
    name: Annotated[str, typer.Argument(metavar="NAME", help="As HF_TOKEN or WANDB_API_KEY.")],
    value: Annotated[str | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Store a key for all projects of this user, in `~/.buckeye/.env`. The value is asked for, or read from a
    pipe: never write it into the command, which others can see."""
    if value is not None or "=" in name:
        plain = name.partition("=")[0]
        raise UsageError(
            "other users can see the words of a command, so the value is not one of them. Type\n"
            f"  buckeye auth set {plain}\n"
            "and then the value. If it was a real one, have it replaced where it is from"
        )
    path = set_key(name, _value(name))
    typer.echo(f"{path}: {name} is set")
    state = next((one for one in key_states() if one.name == name), None)
    if state is not None and state.where != str(path):
        typer.echo(f"warning: the one in {state.where} wins over it here", err=True)


def _value(name: str) -> str:
    if sys.stdin.isatty():
        return str(typer.prompt(name, hide_input=True)).strip()
    return sys.stdin.read().strip()


COMMANDS = {"auth set": auth_set, "auth status": auth_status}
