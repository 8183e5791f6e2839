"""Policy that calls tools at random, with arguments that fit their schemas."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from buckeye.envs.base import Message, Reply, Tool
from buckeye.mcp.actions.schema_text import required_names, resolve_reference
from buckeye.mcp.actions.tool_list import make_call_reply
from buckeye.monitor.conversation import content_text

_MAX_CALLS = 30
_TEXT_PROBABILITY = 0.15  # of a text reply, which ends the rollout
_OPTIONAL_PROBABILITY = 0.25  # of an optional argument
_KNOWN_PROBABILITY = 0.5  # of a value that the schema lists, such as a default or an example
_MAX_DEPTH = 6
_WORD = re.compile(r"\"([^\"\n]{1,80})\"|'([^'\n]{1,80})'|([\w./:@-]*\w)")

Schema = Mapping[str, Any]


class RandomPolicy:
    """Policy that calls random tools, with texts and numbers from the conversation as arguments."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)  # noqa: S311  not for security
        self._tools: Sequence[Tool] = ()
        self._form = ""
        self._turns = 0

    def set_tools(self, tools: Sequence[Tool], form: str) -> None:
        """Set the callable tools, and the text form of a call with a placeholder `{call}`."""
        self._tools, self._form = tools, form

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Return a tool call or a text.

        The reply is a text if tools are missing, after many calls, or at random.
        """
        words = conversation_words(messages)
        offered = tools or self._tools
        self._turns += 1
        replies_with_text = self._rng.random() < _TEXT_PROBABILITY if tools else self._turns > _MAX_CALLS
        if not offered or replies_with_text:
            text = self._rng.choice(words)
            return Reply(text=text, finish_reason="stop", message={"role": "assistant", "content": text})
        function = self._rng.choice(offered)["function"]
        schema = function.get("parameters") or {}
        arguments = random_value({"type": "object", **schema}, schema, self._rng, words)
        return make_call_reply(function["name"], arguments, form="" if tools else self._form)


def conversation_words(messages: Sequence[Message]) -> list[str]:
    """Return the quotations, numbers and words of user and tool messages; at least one word."""
    read = [
        content_text(message.get("content")) for message in messages if message["role"] in ("user", "tool")
    ]
    found = (next(filter(None, match)) for text in read for match in _WORD.findall(text))
    return list(dict.fromkeys(found)) or ["nothing"]


def random_value(schema: Any, root: Schema, rng: random.Random, words: Sequence[str], depth: int = 0) -> Any:
    """Return a value that fits a JSON Schema in types, enumerations, bounds and required members."""
    schema = resolve_reference(schema, root)
    if "const" in schema:
        return schema["const"]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return rng.choice(schema["enum"])
    examples = schema.get("examples")
    known = [schema.get("default"), *(examples if isinstance(examples, list) else [])]
    known = [value for value in known if value is not None]
    if known and rng.random() < _KNOWN_PROBABILITY:
        return rng.choice(known)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return random_value(rng.choice(schema[key]), root, rng, words, depth + 1)
    kinds = schema.get("type") or ("object" if "properties" in schema else "string")
    kind = rng.choice(kinds) if isinstance(kinds, list) else kinds
    if depth > _MAX_DEPTH:
        return None
    if kind == "object":
        needed, members = required_names(schema), schema.get("properties") or {}
        chosen = [name for name in members if name in needed or rng.random() < _OPTIONAL_PROBABILITY]
        return {name: random_value(members[name], root, rng, words, depth + 1) for name in chosen}
    if kind == "array":
        shortest = int(schema.get("minItems") or 0)
        size = rng.randint(shortest, max(shortest, min(int(schema.get("maxItems") or 2), 2)))
        return [random_value(schema.get("items"), root, rng, words, depth + 1) for _ in range(size)]
    if kind in ("integer", "number"):
        read = [int(word) for word in words if re.fullmatch(r"-?\d{1,9}", word)]
        return _number(kind, schema, rng, read)
    if kind in ("boolean", "null"):
        return rng.random() < 0.5 if kind == "boolean" else None
    shortest, longest = int(schema.get("minLength") or 0), int(schema.get("maxLength") or 10**6)
    word = rng.choice([word for word in words if shortest <= len(word) <= longest] or list(words))
    return word.ljust(shortest, ".")[:longest]


def _number(kind: Any, schema: Schema, rng: random.Random, read: Sequence[int]) -> float:
    """Return a number within the bounds: a number of the conversation, else an integer if one fits."""
    low = max(_bound(schema, "minimum", -1e9), _bound(schema, "exclusiveMinimum", -1e9))
    high = min(_bound(schema, "maximum", 1e9), _bound(schema, "exclusiveMaximum", 1e9))
    open_at = {_bound(schema, name, math.nan) for name in ("exclusiveMinimum", "exclusiveMaximum")}
    near = math.floor(max(low, min(0, high)))
    whole = [number for number in (*read, *range(near, near + 10)) if low <= number <= high]
    fitting = [number for number in whole if number not in open_at]
    if fitting:
        known = [number for number in fitting if number in read]
        return rng.choice(known or fitting)
    return near if kind == "integer" else (low + high) / 2


def _bound(schema: Schema, name: str, otherwise: float) -> float:
    """Return a numeric bound of the schema; `otherwise` if it is missing or not a number."""
    value = schema.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else otherwise
