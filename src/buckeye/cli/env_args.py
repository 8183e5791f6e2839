"""What commands on environments share: arguments of an environment on a command line, and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from buckeye.base.columns import aligned
from buckeye.errors import UsageError

# Tables that commands print.


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns under their names on stdout."""
    print(aligned([header, *rows]))


# What an environment is given on a command line: `--arg name=value`, `--args '{"name": value}'`, and
# `--variables NAME`.

Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--variables",
        metavar="NAME",
        help="A variable that the environment is given, from the environment or .env; also A,B.",
    ),
]


def variable_names(given: Sequence[str] | None) -> list[str]:
    """The names of all `--variables`."""
    return [name.strip() for names in given or () for name in names.split(",") if name.strip()]


def environment_args(pairs: Sequence[str], text: str | None) -> dict[str, Any]:
    """The arguments of `--args` (a JSON object) with those of `--arg` over them. Raises UsageError."""
    args = _json_object(text) if text else {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--arg {pair}: write NAME=VALUE, as --arg seed=3")
        args[name.strip()] = _value(value)
    return args


def _json_object(text: str) -> dict[str, Any]:
    try:
        args = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--args is not JSON: {error}. Write --args '{{\"name\": value}}'.") from None
    if not isinstance(args, dict):
        raise UsageError(f"--args is a JSON object, as '{{\"name\": value}}', not {text}")
    return args


def _value(text: str) -> Any:
    """JSON if it is JSON; else a list where there are commas; else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        parts = [part.strip() for part in text.split(",")]
        return [part for part in parts if part] if len(parts) > 1 else text
