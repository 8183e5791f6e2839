"""The programs `buckeye` and `rl`: find a command in the tree, load it, run it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from buckeye.cli.help import show_group
from buckeye.cli.removed import removed_command_error
from buckeye.cli.tree import BY_WORDS, GROUPS, child_commands, command_lines, find_command

_HELP = ("--help", "-h")


def main() -> None:
    """Run `buckeye`, or `python -m buckeye`."""
    _main(sys.argv[1:], "buckeye")


def rl() -> None:
    """Run `rl`, which is `buckeye rl`."""
    _main(["rl", *sys.argv[1:]], "rl")


def _main(argv: list[str], program: str) -> None:
    if (show := _page(argv, program)) is not None:
        sys.exit(_printed(show))
    from buckeye.cli.errors import run_command, take_debug_flag

    run_command(lambda: _run(take_debug_flag(argv), program))


def _page(argv: Sequence[str], program: str) -> Callable[[], None] | None:
    """Return a function that prints the requested help, or None if that needs more than the tree."""
    words, rest = find_command(argv)
    asks = bool(rest) and rest[0] in _HELP
    if words == "rl" and asks and len(rest) == 1:
        from buckeye.cli.rl_page import show_rl_page

        return show_rl_page
    if words == "" and rest == ["--help-all"]:
        return lambda: print("\n".join(command_lines()))
    if words not in BY_WORDS and asks:
        return lambda: show_group(words, _typed(words, program))
    return None


def _printed(show: Callable[[], None]) -> int:
    try:
        show()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _run(argv: list[str], program: str) -> int | None:
    """Run the command in a command line and return its exit code."""
    words, rest = find_command(argv)
    if words in ("", "rl") and rest == ["--version"]:
        from buckeye.version import __version__

        print(f"buckeye {__version__}")
        return 0
    _refuse_unknown(words, rest)
    if words not in BY_WORDS:
        show_group(words, _typed(words, program))
        return 2
    if BY_WORDS[words].takes_settings:
        from buckeye.cli.commands import command_function

        return command_function(words)(rest)  # type: ignore[no-any-return]
    from buckeye.cli.typer_commands import run

    return run(words, rest, _typed(words, program))


def _refuse_unknown(words: str, rest: Sequence[str]) -> None:
    """Raise UsageError if a command line does not name a command."""
    if not rest or rest[0].startswith(("-", "@")) or (words in BY_WORDS and words != "rl"):
        return
    from buckeye.errors import UsageError

    typed = f"{words} {rest[0]}".strip()
    if gone := removed_command_error([*words.split(), *rest]):
        raise gone
    known = child_commands(words)
    near = get_close_matches(rest[0], known, 1)
    meant = " ".join(filter(None, ("buckeye", words, *near)))
    hint = f"Did you mean `{meant}`?" if near else ""
    if words == "rl":
        from buckeye.cli.rl_page import file_hint

        hint = file_hint(rest[0]) or hint
    hint = hint or f"Commands: {', '.join(known)}."
    raise UsageError(f"{typed}: no such command. {hint}")


def _typed(words: str, program: str) -> str:
    """Return a command as the user would type it: `rl status` if the program was `rl`."""
    return words if program == "rl" and words in (*BY_WORDS, *GROUPS) else f"buckeye {words}".strip()
