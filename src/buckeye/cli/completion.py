"""Completion in bash, zsh and fish, for `buckeye` and `rl`."""

from __future__ import annotations

import os
import sys

import typer

from buckeye.cli.typed import CommandGroup

_VARIABLE = "_BUCKEYE_COMPLETE"
"""The variable with which the scripts of typer ask a program for words."""
_LINE = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
"""Where they put what is typed: bash, and the other shells."""
_PROGRAMS = ("buckeye", "rl")


def complete(program: str) -> int:
    """Answer the shell for a program."""
    from typer.completion import completion_init  # type: ignore[attr-defined]

    if program == "rl":
        for name in _LINE:
            if name in os.environ:
                os.environ[name] = f"buckeye {os.environ[name]}"
        if "COMP_CWORD" in os.environ:
            os.environ["COMP_CWORD"] = str(int(os.environ["COMP_CWORD"]) + 1)
    sys.argv = ["buckeye"]
    completion_init()  # typer knows no shell before
    return int(CommandGroup(name="")(prog_name="buckeye", complete_var=_VARIABLE, standalone_mode=False) or 0)


def set_up_completion(*, install: bool) -> int:
    """Install completion for the shell that the command is typed in, or print its script."""
    from typer.completion import (  # type: ignore[attr-defined]
        _get_shell_name,
        get_completion_script,
    )
    from typer.completion import install as install_script  # type: ignore[attr-defined]

    if install:
        for shell, path in [install_script(prog_name=one, complete_var=_VARIABLE) for one in _PROGRAMS]:
            typer.echo(f"{path}: {shell} completes {path.stem.lstrip('_')}")
        typer.echo("It begins with the next shell that is started.")
        return 0
    detected = _get_shell_name()
    if detected is None:
        from buckeye.errors import UsageError

        raise UsageError("cannot detect the shell; type the command in that shell itself")
    for program in _PROGRAMS:
        typer.echo(get_completion_script(prog_name=program, complete_var=_VARIABLE, shell=detected))
    return 0
