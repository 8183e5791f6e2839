"""Pages of help, no wider than the terminal: of a list of commands, and of one command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from typer import Typer
from typer.core import TyperCommand, TyperGroup

from buckeye.base.distribution import SATELLITES, absent, ask, is_there

if TYPE_CHECKING:
    from rich.text import Text

GROUPS = {
    "buckeye": {
        "Train": {
            "rl": "train; also rl init, list, status, logs, stop, ...",
            "hf": "tasks as a dataset, on the hub or in a folder",
            "auth": "keys: which are known, and from where",
            "sft": "fine-tune on chats",
            "ui": "see runs in a browser",
            "demo": "all of it at once, with a small model",
        },
        "Environments": {
            "env": "write, check, build, push, install them",
            "gateway": "serve MCP environments on one address",
            "eval": "try any model on an environment",
        },
        "Models": {
            "model": "make a small one",
            "chat": "talk to one",
            "export": "a checkpoint as a model for others",
            "inference": "serve one to OpenAI clients",
            "vllm": "install vLLM, apart from everything else",
        },
        "Parts of a run": {
            "trainer": "the trainer alone",
            "orchestrator": "the orchestrator alone",
        },
    },
    "env": {
        "Write": {
            "new": "a new environment that works, to change",
            "check": "what can be gamed in it, and what leaks",
            "play": "play a task yourself, or watch chance or a model",
        },
        "As an image": {
            "build": "build, start once, write buckeye.lock.yaml",
            "push": "to a registry",
        },
        "Of others": {
            "trust": "allow what the tasks of a dataset use",
            "install": "one, with an interpreter of its own",
            "list": "which are installed",
            "info": "one of them: versions, source, size",
            "shell": "run a program of one",
            "remove": "delete one",
        },
    },
}
"""Which commands belong together, in this order, and what they do in a few words. A command that is not named
here is shown last, with the beginning of its help."""

_LAST = {
    "buckeye": ("`buckeye COMMAND --help` explains one; --debug, --version, --install-completion",),
    "env": ("`buckeye env COMMAND --help` explains one.",),
}
_NARROWEST_TEXT = 14
_BESIDE_FROM = 72


class GroupedHelp(TyperGroup):
    """A group whose help fits on a screen."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Usage, what it is, and a line for each command."""
        from rich.console import Console
        from rich.text import Text

        name = self.name or "buckeye"
        console = Console(soft_wrap=True)
        console.print(Text(f"usage: {ctx.command_path} COMMAND ...", style="bold"))
        console.print(Text("\n".join(wrap(self.help or "", console.width)) + "\n"))
        for line in self._lines(name, ctx, console.width):
            console.print(line)
        for number, text in enumerate(_LAST.get(name, ())):
            folded = "\n".join(wrap(text, console.width))
            console.print(Text(folded if number else f"\n{folded}", style="dim"))

    def _lines(self, name: str, ctx: Any, width: int) -> Iterator[Text]:
        from rich.text import Text

        shown = {one: cmd for one in self.list_commands(ctx) if not (cmd := self.commands[one]).hidden}
        groups = {t: group for t, group in GROUPS.get(name, {}).items() if group.keys() & shown.keys()}
        listed = {one for group in groups.values() for one in group}
        room = max(map(len, shown))
        beside = width >= _BESIDE_FROM  # else the titles have lines of their own
        left = max(map(len, groups), default=0) + 2 if beside and groups else 2
        most = max(_NARROWEST_TEXT, width - left - room - 2)
        groups["More" if groups else ""] = {
            one: cmd.get_short_help_str(most) for one, cmd in shown.items() if one not in listed
        }
        for title, group in groups.items():
            there = [one for one in group if one in shown]
            if there and title and not beside:
                yield Text(title, style="bold")
            for number, one in enumerate(there):
                line = Text((title if beside and number == 0 else "").ljust(left), style="bold")
                line.append(one.ljust(room + 2), style="cyan not bold")
                text = wrap(group[one], most)
                line.append(f"\n{' ' * (left + room + 2)}".join(text), style="not bold")
                yield line


Rows = Sequence[tuple[str, str]]

_VALUES = {"path": "PATH", "str": "TEXT", "list[str]": "TEXT", "int": "N", "float": "X"}
_NARROWEST_COLUMN = 20


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

    def offer(self, words: str, where: str, *, hidden: bool = False) -> None:
        """Have the command `words` from the `COMMANDS` of a satellite's module, or one that says what to
        install."""
        name, satellite = words.rpartition(" ")[2], where.partition(".")[0]
        if is_there(satellite):
            self.command(name, hidden=hidden)(ask(f"{where}:COMMANDS", words)[words])
            return

        def command() -> None:
            raise absent(satellite, f"the command {words}")

        settings = {"ignore_unknown_options": True, "allow_extra_args": True}
        told = f"Needs {SATELLITES[satellite]}."
        self.command(name, help=told, hidden=hidden, context_settings=settings)(command)


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
    left = min(longest + 4, max(width - _NARROWEST_COLUMN, 6))
    for name, meaning in rows:
        line = Text(f"  {name}", style="cyan")
        room = left - 2 - len(name)
        line.append(" " * room if room >= 2 else f"\n{' ' * left}")
        most = max(width - left, _NARROWEST_COLUMN)
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
