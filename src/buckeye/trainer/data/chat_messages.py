"""Check messages of chat data, and write them as chat templates get them when a model is served."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from buckeye.chat.messages import ChatMessage
from buckeye.envs.call_arguments import read_arguments
from buckeye.errors import UsageError


class BrokenCallError(UsageError):
    """A trained message with a call that no model should learn: its conversation is left out."""


_KNOWN = frozenset(ChatMessage.__struct_fields__)


def read_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Message `index` of a conversation, as a chat template gets it: parts of text joined, calls with an id
    and their arguments as JSON text, no empty fields. What OpenAI's format does not have is left as it is.

    Raises `UsageError` for what is no message, and for a trained one that says nothing; `BrokenCallError` for
    a trained one that has a call without a name, or one whose arguments are not an object.
    """
    known = {key: value for key, value in message.items() if key in _KNOWN}
    broken: list[str] = []
    if isinstance(known.get("tool_calls"), list):
        calls = enumerate(known["tool_calls"])
        known["tool_calls"] = [_full_call(call, place, broken) for place, call in calls]
    try:
        plain = msgspec.convert(known, ChatMessage).plain()
    except msgspec.ValidationError as error:
        raise UsageError(f"message {index}: {error}") from error
    says = any(plain.get(field) for field in ("content", "tool_calls", "reasoning_content"))
    if index and plain["role"] == "assistant" and not says and is_trained(message):
        raise UsageError(
            f"message {index} is the assistant's and has no content, tool_calls or reasoning_content: the "
            'model would be trained to say nothing; give it "weight": 0 to leave it out'
        )
    if broken and plain["role"] == "assistant" and is_trained(message):
        raise BrokenCallError(f"message {index}: {broken[0]}")
    return {**{key: value for key, value in message.items() if key not in _KNOWN}, **plain}


def is_trained(message: Mapping[str, Any]) -> bool:
    """By `weight` (0 or 1, as OpenAI's fine-tuning format has it) or `train` (true or false). Raises
    `UsageError` for other values."""
    flags = [message[key] for key in ("weight", "train") if message.get(key) is not None]
    wrong = [flag for flag in flags if flag not in (0, 1)]
    if wrong:
        raise UsageError(f"an assistant message has the weight {wrong[0]!r}; it can be 0 or 1 only")
    return all(flags)


def _full_call(call: Any, place: int, broken: list[str]) -> Any:
    """A call with an id, and with its arguments as the JSON text of an object, where data sets leave out the
    one and write the other in many ways. Adds to `broken` what is wrong with it."""
    if not isinstance(call, dict):
        return call
    full = {"id": f"call{place}", **call}
    function = full.get("function")
    if not isinstance(function, dict):
        return full
    written, name = function.get("arguments"), function.get("name")
    if not name:
        broken.append("a call has no name")
    try:
        found = read_arguments(written)
    except ValueError as error:
        broken.append(f"the arguments of {name} {error}")
        text = written if isinstance(written, str) else json.dumps(written, ensure_ascii=False)
    else:
        is_object_text = isinstance(written, str) and written.lstrip().startswith("{")
        text = str(written) if is_object_text else json.dumps(found, ensure_ascii=False)
    full["function"] = {**function, "arguments": text}
    return full
