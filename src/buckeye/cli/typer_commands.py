"""Run commands whose args typer parses, and print their help in Buckeye's layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from buckeye.cli.commands import command_function
from buckeye.cli.errors import run_typer
from buckeye.cli.help import show_page

_VALUES = {"path": "PATH", "str": "TEXT", "list[str]": "TEXT", "int": "N", "float": "X"}
_ACCEPTS_SETTINGS = {"fetch", "rl doctor", "rl resume", "rl tune"}
"""Commands that also accept files and flags of settings."""


class PageCommand(TyperCommand):
    """Typer command whose help has Buckeye's layout."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the usage, the description, the arguments and the options."""
        shown = [param for param in self.get_params(ctx) if not getattr(param, "hidden", False)]
        arguments = [param for param in shown if param.param_type_name == "argument"]
        usage = [ctx.command_path, *(_argument_text(param) for param in arguments)]
        usage += [*(["[CONFIG ...]"] if ctx.allow_extra_args else []), "[OPTIONS]"]
        show_page(
            f"usage: {' '.join(usage)}",
            self.help or "",
            {
                "Arguments": [(_argument_text(param).strip("[]"), _help_text(param)) for param in arguments],
                "Options": [
                    (_option_text(param, ctx), _help_text(param)) for param in shown if param not in arguments
                ],
            },
        )


def typer_command(name: str) -> TyperCommand:
    """Return the typer command of this name; imports its module."""
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    settings = (
        {"ignore_unknown_options": True, "allow_extra_args": True} if name in _ACCEPTS_SETTINGS else None
    )
    app.command(name.rpartition(" ")[2], cls=PageCommand, context_settings=settings)(command_function(name))
    return typer.main.get_command(app)  # type: ignore[return-value]


def run(name: str, argv: Sequence[str], program: str) -> int:
    """Run a command and return its exit code. `program` is what the user typed before the args."""
    return run_typer(typer_command(name), argv, program)


def _argument_text(param: Any) -> str:
    name = str(param.metavar or param.name.upper())
    return name if param.required else f"[{name}]"


def _option_text(param: Any, ctx: Any) -> str:
    """Return the option as help shows it, without further long names: words of other tools."""
    short = [name for name in param.opts if not name.startswith("--")]
    names = ", ".join([*short, *[name for name in param.opts if name not in short][:1]])
    if param.is_flag:
        return " / ".join([names, *param.secondary_opts])
    kind = param.display_type(ctx).strip("<>").removesuffix(" range")
    return f"{names} {param.metavar or _VALUES.get(kind, kind)}"


def _help_text(param: Any) -> str:
    """Return the help of a parameter, with its default unless the help names it."""
    text, default = param.help or "", param.default
    if param.param_type_name == "option" and param.required:
        return f"{text} (required)"
    if "efault" in text or default in (None, False, "", (), []):
        return text
    if getattr(param, "is_flag", False):
        default = param.opts[0]
    return f"{text} (default {default})"
