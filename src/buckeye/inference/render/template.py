"""A model's chat template: messages to text, and what the template can say."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

from buckeye.envs.base import Message, Tool
from buckeye.errors import UsageError
from buckeye.inference.render.plain import fold_calls, plain_messages

log = logging.getLogger(__name__)

_PROBE = "buckeye"
_TODAY = datetime(2024, 7, 26)
"""What Llama's templates write without a clock, for all that ask one: a prompt must not depend on the day it
is rendered, or a run over midnight would change, and one that is resumed would not be the same."""

_ASKS_CLOCK = re.compile(r"""strftime_now\(\s*(?P<quote>["'])(?P<format>.*?)(?P=quote)\s*\)""")

_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe-description",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
_PROBE_CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "probe", "arguments": {"key": "probe-value"}},
}
QUESTION = {"role": "user", "content": "What is it?"}
TOOL_TURN = (
    QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "tool_call_id": "call00000", "name": "probe", "content": "probe-result"},
)
"""A question, a call and its result: what a template with tools must be able to write."""
PROBE_TOOLS = (_PROBE_TOOL,)


class ChatTemplate:
    """The chat template of a tokenizer. Where it knows no tools, they are written into plain messages."""

    def __init__(self, tokenizer: Any, model_path: str) -> None:
        self._tokenizer = tokenizer
        self._model_path = model_path

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, prompt: bool) -> str:
        """The text of messages, with `prompt` up to where the next assistant message begins.

        Raises `UsageError` if the template refuses, or if there is none.
        """
        if self.speaks_tools:
            return self._render([readable(message) for message in messages], tools, prompt=prompt)
        return self._render(plain_messages(messages, tools), (), prompt=prompt)

    @cached_property
    def speaks_tools(self) -> bool:
        """Whether the template writes tools, calls and their results itself."""
        text = self._probe(TOOL_TURN, PROBE_TOOLS, prompt=True)
        return all(word in text for word in ("probe-description", "probe-value", "probe-result"))

    @cached_property
    def thinks(self) -> bool:
        """Whether the template has a place for reasoning apart from the content."""
        reply = {"role": "assistant", "content": "It is that.", "reasoning_content": _PROBE}
        return _PROBE in self._probe((QUESTION, reply), (), prompt=False) or opens_thinking(
            self._probe((QUESTION,), (), prompt=True)
        )

    @cached_property
    def call_format(self) -> str:
        """How calls are written: "json" for one bare JSON object with `parameters`, as Llama 3 does, else
        "tagged" for `<tool_call>` and JSON with `arguments`."""
        text = self._probe(TOOL_TURN[:2], PROBE_TOOLS, prompt=False)
        call = text[: text.rfind("probe-value")].rfind('"parameters"')
        bare = self.speaks_tools and "<tool_call>" not in text and call > text.rfind("What is it?")
        return "json" if bare else "tagged"

    @cached_property
    def end_of_turn(self) -> tuple[str, int] | None:
        """The special token that follows an assistant's message, as text and id; None if there is none.
        (Base models with a template often name another token as their end of text.)"""
        text = self._probe((QUESTION, {"role": "assistant", "content": _PROBE}), (), prompt=False)
        ids = self._tokenizer.encode(text[text.rfind(_PROBE) + len(_PROBE) :], add_special_tokens=False)
        known = self._tokenizer.added_tokens_decoder
        return (known[ids[0]].content, ids[0]) if text and ids and ids[0] in known else None

    def _probe(self, messages: Sequence[Message], tools: Sequence[Tool], *, prompt: bool) -> str:
        """The text of messages as they are, empty if the template refuses them."""
        try:
            return self._render([dict(message) for message in messages], tools, prompt=prompt)
        except UsageError:
            return ""

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[Tool], *, prompt: bool) -> str:
        if not self._tokenizer.chat_template:
            raise UsageError(
                f"The tokenizer of {self._model_path} has no chat template, so it cannot render messages."
            )
        from jinja2 import TemplateError

        offered = [dict(tool) for tool in tools] or None
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=offered,
                chat_template=_without_clock(self._tokenizer.get_chat_template(tools=offered)),
                add_generation_prompt=prompt,
                tokenize=False,
                date_string=_TODAY.strftime("%d %b %Y"),
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise UsageError(
                f"The chat template of {self._model_path} cannot render these messages: {error}"
            ) from error


@lru_cache
def _without_clock(template: str) -> str:
    """A template that asks for the time is told `_TODAY`. (Functions cannot be given to templates.)"""
    pinned = _ASKS_CLOCK.sub(lambda asked: json.dumps(_TODAY.strftime(asked["format"])), template)
    if "strftime_now(" in pinned:
        log.warning(
            "The chat template asks for the time in a way that is not pinned: its prompts may change."
        )
    return pinned


def opens_thinking(prompt: str) -> bool:
    """Whether a prompt has begun the reasoning for the model."""
    return prompt.rstrip().endswith("<think>")


def readable(message: Message) -> dict[str, Any]:
    """A message as templates expect it: arguments as objects. A call that could not be read is put back into
    the content, where it came from."""
    readable = {**message, "content": "" if message.get("content") is None else message["content"]}
    calls = message.get("tool_calls")
    if not calls:
        return readable
    with_objects = [_with_object(call) for call in calls]
    if not all(
        call["function"]["name"] and isinstance(call["function"]["arguments"], dict) for call in with_objects
    ):
        return fold_calls(readable)
    return {**readable, "tool_calls": with_objects}


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}
