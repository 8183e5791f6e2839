"""Look up the function of a command. The module of a command is imported when the command runs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from buckeye.cli.tree import BY_NAME


def command_function(command: str) -> Callable[..., Any]:
    """Return the function of a command, by its name in the tree."""
    module, _, name = BY_NAME[command].function.partition(".")
    return getattr(import_module(f"buckeye.cli.{module}"), name)  # type: ignore[no-any-return]
