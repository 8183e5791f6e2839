"""Map tool names to names that OpenAI-compatible servers accept, and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from buckeye.envs.base import Message, Tool
from buckeye.errors import InferenceError

_MAX_LENGTH = 64
_ACCEPTED = re.compile(rf"[A-Za-z_][A-Za-z0-9_-]{{0,{_MAX_LENGTH - 1}}}")
_TOOL_INDEX = re.compile(r"\btools(?:\[|\.|', |/)(\d+)")


class ToolNames:
    """Map from the name of each tool to its server-side name, which is equal if all servers accept it."""

    def __init__(self, tools: Sequence[Tool], messages: Sequence[Message]) -> None:
        self._offered = [str(tool["function"]["name"]) for tool in tools]
        called = (
            call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()
        )
        answered = (
            message["name"] for message in messages if message["role"] == "tool" and "name" in message
        )
        self._sent: dict[str, str] = {}
        names = list(dict.fromkeys(map(str, (*self._offered, *called, *answered))))
        for name in sorted(names, key=lambda name: not _ACCEPTED.fullmatch(name)):  # accepted names first
            self._sent[name] = _unique(name, self._sent.values())
        self._original = {sent: name for name, sent in self._sent.items() if name in self._offered}

    def to_server_name(self, name: str) -> str:
        """Return the server-side name of a tool."""
        return self._sent.get(name, name)

    def to_server_tools(self, tools: Iterable[Tool]) -> list[Tool]:
        """Return the tools with server-side names."""
        return [_renamed(tool, self._sent) for tool in tools]

    def to_server_message(self, message: Message) -> Message:
        """Return a message with server-side tool names."""
        if message["role"] == "tool" and "name" in message:
            message = {**message, "name": self.to_server_name(message["name"])}
        return self._with_calls(message, self._sent)

    def from_server_message(self, message: Message) -> Message:
        """Return a reply of the server with the original tool names."""
        return self._with_calls(message, self._original)

    def explain_error(self, error: InferenceError) -> InferenceError:
        """Return the error with the name of the tool, if the server refers to a tool by its index."""
        match = _TOOL_INDEX.search(error.message)
        if match is None or int(match[1]) >= len(self._offered):
            return error
        name = self._offered[int(match[1])]
        sent = self.to_server_name(name)
        sent_as = "" if sent == name else f", sent as {sent!r}"
        return InferenceError(
            f"{error.message} (tool {name!r}{sent_as})",
            code=error.code,
            hint="rename the tool in action_mappings, or remove it",
        )

    @staticmethod
    def _with_calls(message: Message, names: Mapping[str, str]) -> Message:
        calls = message.get("tool_calls")
        return {**message, "tool_calls": [_renamed(call, names) for call in calls]} if calls else message


def _renamed(item: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a tool, or a tool call, with its name replaced according to `names`."""
    function = item.get("function")
    if not isinstance(function, Mapping) or function.get("name") not in names:
        return dict(item)
    return {**item, "function": {**function, "name": names[function["name"]]}}


def _unique(name: str, taken: Iterable[str]) -> str:
    accepted = re.sub(r"[^A-Za-z0-9_-]", "_", name) or "unnamed"
    accepted = accepted if _ACCEPTED.match(accepted) else f"_{accepted}"
    known, number, candidate = set(taken), 1, accepted[:_MAX_LENGTH]
    while candidate in known:
        number += 1
        suffix = f"_{number}"
        candidate = accepted[: _MAX_LENGTH - len(suffix)] + suffix
    return candidate
