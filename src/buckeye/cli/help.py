"""The pages that list commands: grouped, a line each, no wider than the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.text import Text

GROUPS = {
    "buckeye": {
        "Train": {
            "rl": "train; also rl init, list, status, logs, stop, ...",
            "hf": "tasks as a dataset, on the hub or in a folder",
            "auth": "keys: which are known, and from where",
            "sft": "fine-tune on chats",
            "demo": "all of it at once, with a small model",
        },
        "Environments": {
            "env": "write, check, build, push, install them",
            "gateway": "serve MCP environments on one address",
            "eval": "try any model on an environment",
            "evals": "the same as eval @ FILE, token by token",
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
            "node": "make this host a node of another's run",
        },
    },
    "env": {
        "Write": {
            "new": "a new environment that works, to change",
            "check": "what can be gamed in it, and what leaks",
            "report": "what training changed, task by task",
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
    "buckeye": (
        "`buckeye COMMAND --help` explains one; `--debug` adds tracebacks; `--version`.",
        "Completion in bash, zsh and fish, for all programs: buckeye --install-completion",
    ),
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
