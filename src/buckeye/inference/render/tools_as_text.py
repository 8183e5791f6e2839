"""Conversion of tools, calls and results to plain messages, for chat templates that do not support tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from buckeye.envs.base import Message, Tool

_TOOLS = """\
You can call these tools:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments inside <tool_call></tool_call>:
<tool_call>
{{"name": "<name>", "arguments": {{...}}}}
</tool_call>"""


def plain_messages(messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the conversation as messages that have only a role and a text.

    The system message describes the tools. Results of calls become messages of the user.
    """
    plain: list[dict[str, Any]] = []
    in_results = False
    for message in messages:
        if message["role"] != "tool":
            plain.append(fold_calls(message))
        elif in_results:
            plain[-1]["content"] += "\n" + _result_text(message)
        else:
            plain.append({"role": "user", "content": _result_text(message)})
        in_results = message["role"] == "tool"
    return _with_tools(plain, tools) if tools else plain


def fold_calls(message: Message) -> dict[str, Any]:
    """Return a message without `tool_calls`. Its calls are text at the end of its content."""
    content = message.get("content")
    folded = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [_call_text(call["function"]) for call in message.get("tool_calls") or ()]
    folded["content"] = "\n".join([text for text in (content,) if text] + calls)
    return folded


def _call_text(function: Mapping[str, Any]) -> str:
    name, arguments = function["name"], function["arguments"]
    if arguments is None or arguments == "":
        arguments = "{}"
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    # A call without a name could not be parsed. Its arguments are the text that the model wrote.
    body = (
        f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}' if name else arguments
    )
    return f"<tool_call>\n{body}\n</tool_call>"


def _result_text(message: Message) -> str:
    return f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _TOOLS.format(tools=listed)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
