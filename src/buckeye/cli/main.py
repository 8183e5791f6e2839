"""The `buckeye` command. Launch commands are dispatched by hand: their flags are configuration keys."""

from __future__ import annotations

import sys

from buckeye.cli.completion import complete, is_asked
from buckeye.cli.errors import run_command, run_typer, take_debug_flag
from buckeye.cli.launch import COMMANDS
from buckeye.cli.removed import removed_command_error


def main() -> None:
    """Entry point of `buckeye` and of `python -m buckeye`."""
    if len(sys.argv) > 1 and sys.argv[1] in COMMANDS:
        name = sys.argv.pop(1)
        COMMANDS[name]()
        return
    sys.argv[1:] = take_debug_flag(sys.argv[1:])
    run_command(_typer_main)


def _typer_main() -> int:
    if is_asked():
        return complete(within=False)
    if (error := removed_command_error(sys.argv[1:])) is not None:
        raise error
    from buckeye.cli.app import app

    return run_typer(app, None, "buckeye")
