"""The programs `buckeye` and `rl`: find a command in the tree, load it, run it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from buckeye.cli.help import show_group
from buckeye.cli.tree import BY_NAME, GROUPS, child_commands, command_lines, commands_ending_in, find_command
from buckeye.errors import UsageError

_HELP = ("--help", "-h")


def main() -> None:
    """Run `buckeye`, or `python -m buckeye`."""
    _main(sys.argv[1:], "buckeye")


def rl() -> None:
    """Run `rl`, which is `buckeye rl`."""
    _main(["rl", *sys.argv[1:]], "rl")


def _main(argv: list[str], program: str) -> None:
    if (show := _help_page(argv, program)) is not None:
        sys.exit(_print_page(show))
    if sys.platform != "linux":  # other systems lack modules that the next import needs
        error = UsageError(
            f"Buckeye runs on Linux, not on {sys.platform}",
            code="BK-PLATFORM",
            hint="use a Linux container or machine, or on Windows WSL 2",
        )
        print(error.text, file=sys.stderr)
        sys.exit(error.exit_code)
    from buckeye.cli.errors import run_command, take_debug_flag

    run_command(lambda: _run(take_debug_flag(argv), program))


def _help_page(argv: Sequence[str], program: str) -> Callable[[], None] | None:
    """Return a function that prints the requested help, or None if `argv` requests none from the tree."""
    command, args = find_command(argv)
    wants_help = bool(args) and args[0] in _HELP
    if command == "rl" and wants_help and len(args) == 1:
        from buckeye.cli.rl_page import show_rl_page

        return show_rl_page
    if command == "" and args == ["--help-all"]:
        return lambda: print("\n".join(command_lines()))
    if command not in BY_NAME and wants_help:
        return lambda: show_group(command, _typed_name(command, program))
    return None


def _print_page(show: Callable[[], None]) -> int:
    try:
        show()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _run(argv: list[str], program: str) -> int | None:
    """Run the command in a command line and return its exit code."""
    if wrong := [arg for arg in argv if arg != arg.encode(errors="replace").decode()]:
        hint = "Rename the file or folder, or correct the text"
        raise UsageError(f"not UTF-8: {wrong[0]!a}", code="BK-CLI-ARGUMENT", hint=hint)
    command, args = find_command(argv)
    if command in ("", "rl") and args == ["--version"]:
        from buckeye.version import __version__

        print(f"buckeye {__version__}")
        return 0
    _refuse_unknown(command, args)
    if command not in BY_NAME:
        show_group(command, _typed_name(command, program))
        return 2
    if BY_NAME[command].takes_settings:
        from buckeye.base.process import interrupt_on_signals
        from buckeye.cli.commands import command_function

        if command == "rl":
            interrupt_on_signals()
        return command_function(command)(args)  # type: ignore[no-any-return]
    from buckeye.cli.typer_commands import run

    return run(command, args, _typed_name(command, program))


def _refuse_unknown(command: str, args: Sequence[str]) -> None:
    """Raise UsageError if a command line does not name a command."""
    if not args or args[0].startswith(("-", "@")) or (command in BY_NAME and command != "rl"):
        return
    known, prefix = child_commands(command), f"{command} " if command else ""
    near = commands_ending_in(args[0]) or [prefix + name for name in get_close_matches(args[0], known, 1)]
    suggested = " or ".join(f"`buckeye {name}`" for name in near)
    hint = f"Did you mean {suggested}?" if near else f"Use one of: {', '.join(known)}"
    if command == "rl":
        from buckeye.cli.rl_page import file_hint

        hint = file_hint(args[0]) or hint
    message = f"no such command: {f'{command} {args[0]}'.strip()}"
    raise UsageError(message, code="BK-CLI-UNKNOWN", hint=hint)


def _typed_name(command: str, program: str) -> str:
    """Return a command as the user would type it: `rl status` if the program was `rl`."""
    return command if program == "rl" and command in (*BY_NAME, *GROUPS) else f"buckeye {command}".strip()
