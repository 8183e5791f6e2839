"""Completion in bash, zsh and fish, for `buckeye` and `rl`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand

from buckeye.cli.tree import BY_WORDS, children

_VARIABLE = "_BUCKEYE_COMPLETE"
"""The variable with which the scripts of typer ask a program for words."""
_LINE = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
"""Where they put what is typed: bash, and the other shells."""
_PROGRAMS = ("buckeye", "rl")
_OF_RUNS = ("status", "logs", "stop", "resume", "fork", "clean", "rollouts", "compare", "diagnose", "replay")


@dataclass(frozen=True, slots=True)
class Word:
    """A completion, as the scripts of typer read it."""

    value: str
    help: str = ""
    type: str = "plain"


class SettingsCommand(TyperCommand):
    """A command whose flags are settings; typer knows it for completion only."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return what comes after the words `ctx.args`. Nothing where a file or a value does: there shells
        complete files."""
        words = _next_words(self.name or "", ctx.args, incomplete)
        return [Word(word) for word in dict.fromkeys(words) if word.startswith(incomplete)]


def complete(program: str) -> int:
    """Answer the shell for a program."""
    from typer.completion import completion_init  # type: ignore[attr-defined]

    from buckeye.cli.typed import CommandGroup

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
    shell = _get_shell_name()
    if shell is None:
        from buckeye.errors import UsageError

        raise UsageError("cannot detect the shell; type the command in that shell itself")
    for program in _PROGRAMS:
        typer.echo(get_completion_script(prog_name=program, complete_var=_VARIABLE, shell=shell))
    return 0


def _next_words(name: str, before: Sequence[str], incomplete: str) -> Iterable[str]:
    """Yield what may follow the command `name` and the words `before`."""
    from buckeye.cli.schema import configurations
    from buckeye.config.help import flag_names
    from buckeye.setup.recipe.flags import TrainFlags

    if name == "rl" and before and (words := f"rl {before[0]}") in BY_WORDS:
        return _of_function(words, before[1:], incomplete)
    if before and (before[-1] == "@" or before[-1].startswith("--")) and not incomplete.startswith("-"):
        return []
    first = [*(children("rl") if name == "rl" else ()), "@"] if not before else []
    ours = flag_names(TrainFlags) if name == "rl" else []
    settings = configurations().get(name.rpartition(" ")[2])
    return [*first, *ours, *(flag_names(settings) if settings else ()), "--help", "--help-all", "--version"]


def _of_function(words: str, before: Sequence[str], incomplete: str) -> Iterable[str]:
    from buckeye.cli.typed import typer_command

    if BY_WORDS[words].takes_settings:
        return _next_words(words, before, incomplete)
    if incomplete.startswith("-"):
        params = typer_command(words).params
        return [*(name for param in params for name in param.opts if name.startswith("--")), "--help"]
    if words.removeprefix("rl ") in _OF_RUNS and not before:
        from buckeye.run_files.known_runs import known_runs

        return [run.name for run in known_runs()[0]]
    return []
