"""Policy of a person, who types tool calls or text."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from buckeye.base.json_lines import printable
from buckeye.config.problems import closest, did_you_mean
from buckeye.envs.base import Message, Reply, Tool
from buckeye.mcp.actions.tool_list import make_call_reply

HELP = "Type a call, such as name(argument=value), or text. `?` lists the tools, Ctrl-D exits."
_CALL = re.compile(r"([\w./-]+)\((.*)\)", re.DOTALL)
_BEGIN_OF_CALL = re.compile(r"([\w./-]+)\(")
_CONSTANTS = {"true": True, "false": False, "null": None}


class HumanPolicy:
    """Policy that reads replies from the terminal or a pipe. End of input raises `KeyboardInterrupt`."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._tools: Sequence[Tool] = ()
        self._form = ""
        self._help_shown = False

    def set_tools(self, tools: Sequence[Tool], form: str) -> None:
        """Set the callable tools, and the text form of a call with a placeholder `{call}`."""
        self._tools, self._form = tools, form

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Return the typed reply: a tool call in the form of the environment, or the text unchanged."""
        functions = {tool["function"]["name"]: tool["function"] for tool in tools or self._tools}
        if not self._help_shown and sys.stdin.isatty():
            self._show(HELP)
        self._help_shown, refused = True, ""
        while True:
            line = _read_typed()
            if line == "?":
                self._show("\n".join(_tool_line(function) for function in functions.values()) or "no tools")
                continue
            match = _CALL.fullmatch(line)
            if match is None or match[1] not in functions:
                if line != refused and (problem := _problem_of_call(line, functions)) is not None:
                    self._show(f"{problem} `?` lists the tools. Type the line again to send it as text.")
                    refused = line
                elif line:
                    return Reply(text=line, finish_reason="stop", message=_assistant_message(line))
                continue
            if not tools:
                text = self._form.replace("{call}", line)
                return Reply(text=text, finish_reason="stop", message=_assistant_message(text))
            try:
                return make_call_reply(match[1], read_arguments(match[2], functions[match[1]]), form="")
            except ValueError as error:
                self._show(f"{error}. Write {match[1]}(argument=value)")


def _problem_of_call(line: str, names: Collection[str]) -> str | None:
    """Return why a line that looks like a call is not a call of a tool; None for other text."""
    begin = _BEGIN_OF_CALL.match(line)
    if begin is None or not names:
        return None
    if begin[1] not in names:
        return f"No tool {begin[1]}.{did_you_mean(closest(begin[1], names, count=1))}"
    return None if ")" in line else "The call has no closing parenthesis."


def read_arguments(text: str, function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a typed call: literals, by name or in schema order. Raise `ValueError`."""
    names = list((function.get("parameters") or {}).get("properties") or {})
    try:
        call = ast.parse(f"f({text})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"({text}) is not a list of arguments") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"({text}) is not a list of arguments")
    if len(call.args) > len(names):
        raise ValueError(f"too many arguments; the tool has {len(names)}: {', '.join(names)}")
    given = dict(zip(names, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    return {name: _value(node) for name, node in given.items()}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"{ast.unparse(node)} is not a value (write text in quotes)") from None


def _assistant_message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _tool_line(function: Mapping[str, Any]) -> str:
    names = (function.get("parameters") or {}).get("properties") or {}
    return printable(f"  {function['name']}({', '.join(names)}): {function.get('description') or ''}")


def _read_typed() -> str:
    """Read a line from stdin; a trailing backslash continues it on the next line."""
    lines: list[str] = []
    while not lines or lines[-1].endswith("\\"):
        try:
            lines.append(input("> " if sys.stdin.isatty() else ""))
        except (EOFError, UnicodeDecodeError):
            raise KeyboardInterrupt from None
    return "\n".join(line.removesuffix("\\") for line in lines).strip()
