"""Commands that are functions with annotations: typer parses their words, their help has our look."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from buckeye.cli.commands import function_of
from buckeye.cli.errors import run_typer
from buckeye.cli.help import show_page
from buckeye.cli.tree import BY_WORDS, GROUPS, children, find

_VALUES = {"path": "PATH", "str": "TEXT", "list[str]": "TEXT", "int": "N", "float": "X"}
_AS_TYPED = {"ignore_unknown_options": True, "allow_extra_args": True}
_PASSES_MORE_ON = {"rl resume"}
"""Commands whose further flags are settings."""
_CONFIGURATIONS = {"serve": "inference", "rl doctor": "rl", "rl tune": "rl"}
"""The configuration of a command, where it has another name than the command."""

_OF_RUNS = ("status", "logs", "stop", "resume", "fork", "clean", "rollouts", "compare", "diagnose", "replay")


@dataclass(frozen=True, slots=True)
class Word:
    """A completion, as the scripts of typer read it."""

    value: str
    help: str = ""
    type: str = "plain"


class PageCommand(TyperCommand):
    """A command with a page of help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the call, what it does, its arguments, its options."""
        shown = [param for param in self.get_params(ctx) if not getattr(param, "hidden", False)]
        arguments = [param for param in shown if param.param_type_name == "argument"]
        words = [ctx.command_path, *(_argument(param) for param in arguments), "[OPTIONS]"]
        show_page(
            f"usage: {' '.join(words)}",
            self.help or "",
            {
                "Arguments": [(_argument(param).strip("[]"), _meaning(param)) for param in arguments],
                "Options": [
                    (_option(param, ctx), _meaning(param)) for param in shown if param not in arguments
                ],
            },
        )


class SettingsCommand(TyperCommand):
    """A command whose flags are settings; typer knows it for completion only."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return what comes after the words `ctx.args`. Nothing where a file or a value does: there shells
        complete files."""
        words = _next_words(self.name or "", ctx.args, incomplete)
        return [Word(word) for word in dict.fromkeys(words) if word.startswith(incomplete)]


class CommandGroup(TyperGroup):
    """A group of the tree, whose commands are loaded when one is asked for. Only completion walks it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the visible commands."""
        return list(children(self.name or ""))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command or group `cmd_name`; None if it has none."""
        words = f"{self.name} {cmd_name}".strip()
        if words in GROUPS and words != "rl":
            return CommandGroup(name=words)
        return typer_command(words) if words in BY_WORDS else None

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the names that begin with `incomplete`, without loading their code."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        found = children(self.name or "").items()
        return [Word(name, summary) for name, summary in found if name.startswith(incomplete)]


def typer_command(words: str) -> TyperCommand:
    """Load the command of these words. Its function and its help come from the module of the command."""
    command = BY_WORDS[words]
    if command.takes_settings:
        return SettingsCommand(name=words, help=command.summary, context_settings=dict(_AS_TYPED))
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    settings = dict(_AS_TYPED) if words in _PASSES_MORE_ON else None
    app.command(words.rpartition(" ")[2], cls=PageCommand, context_settings=settings)(function_of(words))
    return typer.main.get_command(app)  # type: ignore[return-value]


def run(words: str, argv: Sequence[str], program: str) -> int:
    """Run the command of these words; return its exit code. `program` is what the user typed for it."""
    return run_typer(typer_command(words), argv, program)


def _next_words(name: str, before: Sequence[str], incomplete: str) -> Iterable[str]:
    """Yield what may follow the command `name` and the words `before`."""
    from buckeye.cli.schema import configurations
    from buckeye.config.help import flag_names
    from buckeye.setup.recipe.flags import TrainFlags

    words, rest = find([*name.split(), *before])
    if words not in BY_WORDS:
        return children(words) if not rest else []
    if words != name:
        return _of_function(words, rest, incomplete)
    if before and (before[-1] == "@" or before[-1].startswith("--")) and not incomplete.startswith("-"):
        return []
    first = [*(children("rl") if name == "rl" else ()), "@"] if not before else []
    ours = flag_names(TrainFlags) if name == "rl" else []
    settings = configurations().get(_CONFIGURATIONS.get(name, name.rpartition(" ")[2]))
    return [*first, *ours, *(flag_names(settings) if settings else ()), "--help", "--help-all", "--version"]


def _of_function(words: str, before: Sequence[str], incomplete: str) -> Iterable[str]:
    if BY_WORDS[words].takes_settings:
        return _next_words(words, before, incomplete)
    if incomplete.startswith("-"):
        params = typer_command(words).params
        return [*(name for param in params for name in param.opts if name.startswith("--")), "--help"]
    if words.removeprefix("rl ") in _OF_RUNS and not before:
        from buckeye.run_files.known_runs import known_runs

        return [run.name for run in known_runs()[0]]
    return []


def _argument(param: Any) -> str:
    name = str(param.metavar or param.name.upper())
    return name if param.required else f"[{name}]"


def _option(param: Any, ctx: Any) -> str:
    short = [name for name in param.opts if not name.startswith("--")]
    names = ", ".join([*short, *(name for name in param.opts if name not in short)])
    if param.is_flag:
        return " / ".join([names, *param.secondary_opts])
    kind = param.display_type(ctx).strip("<>").removesuffix(" range")
    return f"{names} {param.metavar or _VALUES.get(kind, kind)}"


def _meaning(param: Any) -> str:
    """Return the help of a parameter, with its default where the help does not name it."""
    text, default = param.help or "", param.default
    if param.param_type_name == "option" and param.required:
        return f"{text} (required)"
    if "efault" in text or default in (None, False, "", (), []):
        return text
    if getattr(param, "is_flag", False):
        default = param.opts[0]
    return f"{text} (default {default})"
