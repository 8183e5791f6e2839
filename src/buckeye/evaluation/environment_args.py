"""Parse environment arguments of a command line: `--arg name=value`, and `--args '{"name": value}'`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from buckeye.errors import UsageError

_ARGS_HINT = "write for example --args '{\"name\": 3}'"

ArgOption = Annotated[
    list[str] | None,
    typer.Option(
        "--arg", metavar="NAME=VALUE", help="Environment argument; VALUE is JSON, a list a,b,c, or text."
    ),
]
ArgsOption = Annotated[
    str | None,
    typer.Option("--args", "-a", "--env-args", metavar="JSON", help="Environment arguments as JSON."),
]
BaseUrlOption = Annotated[
    str | None,
    typer.Option(
        "--base-url",
        "-b",
        "--api-base-url",
        metavar="URL",
        help="OpenAI-compatible server, such as http://host:port/v1.",
    ),
]
ApiKeyVarOption = Annotated[
    str, typer.Option("--api-key-var", "-k", metavar="NAME", help="Variable with the key of the server.")
]


def environment_args(pairs: Sequence[str] | None, text: str | None) -> dict[str, Any]:
    """Return the arguments of `--args` (a JSON object), updated with those of `--arg`. Raise `UsageError`."""
    args = _json_object(text) if text else {}
    given = set[str]()
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise _argument_error(f"--arg {pair}: not NAME=VALUE", "write for example --arg seed=3")
        if name.strip() in given:
            hint = f"write a list: --arg {name.strip()}=a,b"
            raise _argument_error(f"--arg {name.strip()} is given twice", hint)
        given.add(name.strip())
        args[name.strip()] = _value(value)
    return args


def _json_object(text: str) -> dict[str, Any]:
    try:
        args = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _argument_error(f"--args is not JSON: {error}", _ARGS_HINT) from None
    if not isinstance(args, dict):
        raise _argument_error(f"--args is not a JSON object: {text}", _ARGS_HINT)
    return args


def _argument_error(message: str, hint: str) -> UsageError:
    return UsageError(message, code="BK-CLI-ARGUMENT", hint=hint)


def _value(text: str) -> Any:
    """Return the value of a JSON text, else a list if the text has commas, else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        parts = [part.strip() for part in text.split(",")]
        return [part for part in parts if part] if len(parts) > 1 else text
