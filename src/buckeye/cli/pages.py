"""The pages that explain a command: the words of the call, then what they mean, as wide as the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from typer import Typer
from typer.core import TyperCommand

from buckeye.cli.help import GroupedHelp

if TYPE_CHECKING:
    from rich.text import Text

Rows = Sequence[tuple[str, str]]

_VALUES = {"path": "PATH", "str": "TEXT", "list[str]": "TEXT", "int": "N", "float": "X"}
_NARROWEST_TEXT = 20


class PageCommand(TyperCommand):
    """A command with a page of its own."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The call, what it does, its arguments, its options."""
        shown = [one for one in self.get_params(ctx) if not getattr(one, "hidden", False)]
        arguments = [one for one in shown if one.param_type_name == "argument"]
        words = [ctx.command_path, *(_argument(one) for one in arguments), "[OPTIONS]"]
        show_page(
            f"usage: {' '.join(words)}",
            self.help or "",
            {
                "Arguments": [(_argument(one).strip("[]"), _meaning(one)) for one in arguments],
                "Options": [(_option(one, ctx), _meaning(one)) for one in shown if one not in arguments],
            },
        )


class Commands(Typer):
    """Commands of one group, all with pages of the same look."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=GroupedHelp, pretty_exceptions_enable=False, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Any:
        """As typer's, with a page."""
        return super().command(name, **{"cls": PageCommand, **settings})


def show_page(usage: str, text: str, parts: dict[str, Rows], last: str = "") -> None:
    """Print a page on stdout: `usage` and `text`, rows of a name and its meaning under their titles, `last`.
    Titles without rows are left out; paragraphs are folded, but for indented ones."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    for call in usage.splitlines():
        folded = wrap(call, console.width, subsequent_indent=" " * 9, replace_whitespace=False)
        console.print(Text("\n".join(folded), style="bold"))
    _print_paragraphs(console, text)
    for title, rows in parts.items():
        if rows:
            console.print(Text("\n" + "\n".join(wrap(title, console.width)), style="bold"))
            for line in _lines(rows, console.width):
                console.print(line)
    _print_paragraphs(console, last)


def _print_paragraphs(console: Any, text: str) -> None:
    from rich.text import Text

    for paragraph in filter(None, text.strip("\n").split("\n\n")):
        as_it_is = paragraph.startswith(" ")
        folded = paragraph if as_it_is else "\n".join(wrap(" ".join(paragraph.split()), console.width))
        console.print(Text(f"\n{folded}"))


def _lines(rows: Rows, width: int) -> Iterator[Text]:
    from rich.text import Text

    widest = width // 2 - 2  # longer names have what they mean below them
    longest = max((len(name) for name, _ in rows if len(name) <= widest), default=0)
    left = min(longest + 4, max(width - _NARROWEST_TEXT, 6))
    for name, meaning in rows:
        line = Text(f"  {name}", style="cyan")
        room = left - 2 - len(name)
        line.append(" " * room if room >= 2 else f"\n{' ' * left}")
        most = max(width - left, _NARROWEST_TEXT)
        text = wrap(meaning, most, break_long_words=False, break_on_hyphens=False)
        line.append(f"\n{' ' * left}".join(text), style="not bold default")
        yield line


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
    """Its help, and the default where that does not say it."""
    text, default = param.help or "", param.default
    if param.param_type_name == "option" and param.required:
        return f"{text} (required)"
    if "efault" in text or default in (None, False, "", (), []):
        return text
    if getattr(param, "is_flag", False):
        default = param.opts[0]
    return f"{text} (default {default})"
