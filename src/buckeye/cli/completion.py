"""Completion in bash, zsh and fish, for `buckeye` and for the programs whose flags are settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from buckeye.config.shared import BaseConfig

_ASKED = "_BUCKEYE_COMPLETE"
"""The variable with which the scripts of typer ask a program for words."""
_LINE = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
"""Where they put what is typed: bash, and the other shells."""


@dataclass(frozen=True, slots=True)
class _Word:
    """A completion, as the scripts of typer read it."""

    value: str
    help: str = ""
    type: str = "plain"


_APPS = {
    "init": "buckeye.cli.init:init_app",
    "pods": "buckeye.cli.pods:pods_app",
}
"""Commands of `rl` that satellites have."""


class LaunchCommand(TyperCommand):
    """A command whose flags are configuration keys; typer knows it for help and for completion only."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """What comes next after the words `ctx.args`. Nothing where a file or a value does: there shells
        complete files."""
        words = _next_words(self.name or "", ctx.args, is_flag=incomplete.startswith("-"))
        return [_Word(word) for word in dict.fromkeys(words) if word.startswith(incomplete)]


def is_asked() -> bool:
    """Whether a shell asks this program what could be typed next."""
    return _ASKED in os.environ


def complete(*, within: bool) -> int:
    """Answer the shell for `buckeye`, or for a program that is also a command `within` it."""
    from typer.completion import completion_init  # type: ignore[attr-defined]

    from buckeye.cli.app import app

    if within:
        for name in _LINE:
            if name in os.environ:
                os.environ[name] = f"buckeye {os.environ[name]}"
        if "COMP_CWORD" in os.environ:
            os.environ["COMP_CWORD"] = str(int(os.environ["COMP_CWORD"]) + 1)
    sys.argv = ["buckeye"]
    completion_init()  # typer knows no shell before
    return int(app(prog_name="buckeye", standalone_mode=False) or 0)


def install_completion(value: bool) -> None:
    """Install completion of all programs for the shell that the command is typed in."""
    if value:
        from typer.completion import install  # type: ignore[attr-defined]

        places = [install(prog_name=program, complete_var=_ASKED) for program in _programs()]
        for shell, path in places:
            typer.echo(f"{path}: {shell} completes {path.stem.lstrip('_')}")
        typer.echo("It begins with the next shell that is started.")
        raise typer.Exit


def show_completion(value: bool) -> None:
    """Print the script of all programs for this shell."""
    if value:
        from typer.completion import _get_shell_name, get_completion_script  # type: ignore[attr-defined]

        from buckeye.errors import UsageError

        shell = _get_shell_name()
        if shell is None:
            raise UsageError("which shell this is cannot be told: type the command in that shell itself")
        for program in _programs():
            typer.echo(get_completion_script(prog_name=program, complete_var=_ASKED, shell=shell))
        raise typer.Exit


def configurations() -> dict[str, type[BaseConfig]]:
    """The settings of each program whose flags they are."""
    from buckeye.config.inference import InferenceConfig
    from buckeye.config.orchestrator import OrchestratorConfig
    from buckeye.config.rl import RLConfig
    from buckeye.config.sft import SFTConfig
    from buckeye.config.trainer import TrainerConfig

    return {
        "rl": RLConfig,
        "trainer": TrainerConfig,
        "orchestrator": OrchestratorConfig,
        "inference": InferenceConfig,
        "sft": SFTConfig,
    }


def app_of(word: str) -> TyperGroup | TyperCommand | None:
    """The commands of `rl WORD`, where they are typer's; for a command on runs it is among them."""
    from buckeye.base.distribution import ask, is_there
    from buckeye.cli.launch import RUN_COMMANDS
    from buckeye.cli.runs import runs_app

    found = runs_app if word in RUN_COMMANDS else None
    if (target := _APPS.get(word)) is not None and is_there(target.partition(".")[0]):
        found = ask(target, f"`rl {word}`")
    return typer.main.get_command(found) if found is not None else None  # type: ignore[return-value]


def _programs() -> Sequence[str]:
    from buckeye.cli.launch import COMMANDS

    return ("buckeye", *COMMANDS)


def _next_words(name: str, before: Sequence[str], *, is_flag: bool) -> Iterable[str]:
    from buckeye.cli.launch import RL_COMMANDS
    from buckeye.config.help import flag_names
    from buckeye.setup.recipe.flags import TrainFlags

    if name == "rl" and before and (command := app_of(before[0])) is not None:
        return _words_of(command, before, is_flag=is_flag)
    if before and (before[-1] == "@" or before[-1].startswith("--")) and not is_flag:
        return []
    first = [*(RL_COMMANDS if name == "rl" else ()), "@"] if not before else []
    ours = flag_names(TrainFlags) if name == "rl" else []
    return [*first, *ours, *flag_names(configurations()[name]), "--help", "--help-all", "--version"]


def _words_of(command: Any, before: Sequence[str], *, is_flag: bool) -> Iterable[str]:
    """What comes next after `rl` and the words `before`, the first of which led to `command`."""
    from buckeye.cli.launch import RUN_COMMANDS

    words = list(before if before[0] in RUN_COMMANDS else before[1:])
    while isinstance(command, TyperGroup) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    if isinstance(command, TyperGroup):
        return command.commands
    if is_flag:
        return [*(name for param in command.params for name in param.opts if name.startswith("--")), "--help"]
    if before[0] in RUN_COMMANDS and not words:
        from buckeye.run_files.known_runs import known_runs

        return [run.name for run in known_runs()[0]]
    return []
