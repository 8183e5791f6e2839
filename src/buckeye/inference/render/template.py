"""Chat template of a model: conversion of messages to text, and detection of the features of a template."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from buckeye.envs.base import Message, Tool, find_non_text_part, join_text_parts
from buckeye.envs.call_arguments import read_arguments
from buckeye.errors import UsageError
from buckeye.inference.render.call_format import (
    KEY,
    NAME,
    TAGGED,
    VALUE,
    CallFormat,
    find_call_format,
)
from buckeye.inference.render.control_tokens import ControlTokenEscaper
from buckeye.inference.render.tools_as_text import fold_calls, plain_messages

_PROBE = "buckeye"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "probe-description",
        "parameters": {"type": "object", "properties": {KEY: {"type": "string"}}, "required": [KEY]},
    },
}
_PROBE_CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": NAME, "arguments": {KEY: VALUE}},
}
PROBE_QUESTION = {"role": "user", "content": "What is it?"}
PROBE_SYSTEM = {"role": "system", "content": "Be brief."}
_REPLY = {"role": "assistant", "content": _PROBE}
PROBE_TOOL_TURN = (
    PROBE_QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "tool_call_id": "call00000", "name": "probe", "content": "probe-result"},
)
"""Question, call and result. `ChatTemplate` uses them to test whether a template supports tools."""
PROBE_TOOLS = (_PROBE_TOOL,)


class TooCostlyTemplateError(UsageError):
    """A chat template takes too long, or produces too much text."""

    code = "BK-TEMPLATE"


class ChatTemplate:
    """Chat template of a tokenizer. If it does not support tools, they are described in a system message."""

    def __init__(self, tokenizer: Any, model_path: str) -> None:
        self._tokenizer = tokenizer
        self._model_path = model_path
        self.escaper = ControlTokenEscaper(tokenizer)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, prompt: bool) -> str:
        """Return the text of messages. Convert it to token ids with `escaper.encode`.

        With `prompt`, the text ends where the next assistant message starts.

        Raise `UsageError` if the template rejects the messages, or if the model has no template.
        """
        texts = [_with_text(message, number) for number, message in enumerate(messages, start=1)]
        messages = [self.escaper.escape_message(message) for message in texts]
        tools = [self.escaper.escape_tool(tool) for tool in tools]
        if self.supports_tools:
            text = self._render([readable(message) for message in messages], tools, prompt=prompt)
        else:
            text = self._render(plain_messages(messages, tools), (), prompt=prompt)
        if self._omits_content:
            raise UsageError(
                f"the chat template of {self._model_path} leaves out the text of messages",
                code="BK-TEMPLATE",
                hint="use a template that writes `content` as text, not as a list of parts",
            )
        return text + self.missing_header if prompt else text

    @cached_property
    def missing_header(self) -> str:
        """Header of replies that must be added to the end of prompts, such as `<|im_start|>assistant`.

        A template that ignores `add_generation_prompt` writes the header only before the replies in its
        messages. The model was trained with the header, so prompts need it. For other templates the header
        to add is empty.
        """
        without, with_it = (self._probe((PROBE_QUESTION,), (), prompt=prompt) for prompt in (False, True))
        written = self._probe((PROBE_QUESTION, _REPLY), (), prompt=False)
        if not without or without != with_it or not written.startswith(without):
            return ""
        header, probe, _ = written.removeprefix(without).partition(_PROBE)
        header = header.partition("<think>")[0]  # the model writes this part
        return header if probe and header.strip() else ""

    @cached_property
    def header(self) -> str | None:
        """Text that a prompt has between the last message and the reply, or None if it is unknown."""
        without, with_it = (self._probe((PROBE_QUESTION,), (), prompt=prompt) for prompt in (False, True))
        if not without or not with_it.startswith(without):
            return None
        return with_it.removeprefix(without) or self.missing_header

    def find_problem(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str | None:
        """Return the reason why the template cannot render these messages and tools, or None if it can.

        The reason includes the line of the template.
        """
        try:
            self.text(messages, tools, prompt=True)
        except UsageError as error:
            return str(error)
        return None

    @cached_property
    def supports_tools(self) -> bool:
        """True if the template writes tools, calls and results of calls into its text."""
        text = self._probe(PROBE_TOOL_TURN, PROBE_TOOLS, prompt=True)
        return all(marker in text for marker in ("probe-description", VALUE, "probe-result"))

    @cached_property
    def supports_reasoning(self) -> bool:
        """True if the template writes the reasoning of a reply separately from the content."""
        reply = {"role": "assistant", "content": "It is that.", "reasoning_content": _PROBE}
        return _PROBE in self._probe((PROBE_QUESTION, reply), (), prompt=False) or starts_reasoning(
            self._probe((PROBE_QUESTION,), (), prompt=True)
        )

    @cached_property
    def call_format(self) -> CallFormat:
        """Format in which the template writes calls. `TAGGED` if it does not support tools."""
        if not self.supports_tools:
            return TAGGED
        turn = self._probe(PROBE_TOOL_TURN[:2], PROBE_TOOLS, prompt=False)
        prompt = self._probe(PROBE_TOOL_TURN[:1], PROBE_TOOLS, prompt=True)
        shared = os.path.commonprefix([turn, prompt])  # noqa: RUF071, characters are meant
        return find_call_format(turn[len(shared) :], self.turn_end)

    @cached_property
    def turn_end(self) -> str:
        """Text that the template writes after a reply that is the last message.

        A template that ends a reply only before the next message, such as GLM's, writes nothing. Then it is
        the text up to this message.
        """
        for after in ((), (PROBE_QUESTION,)):
            text = self._probe((PROBE_QUESTION, _REPLY, *after), (), prompt=False)
            _, found, end = text.rpartition(_PROBE)
            end = end.partition(PROBE_QUESTION["content"])[0]
            if not found or end.strip():
                return end if found else ""
        return ""

    @cached_property
    def end_of_turn(self) -> tuple[str, int] | None:
        """Text and id of the special token that ends a reply, or None.

        The end-of-text token of the tokenizer is often another token, such as in base models. A token that
        the template also writes between reasoning and content does not end a reply.
        """
        reply = {**_REPLY, "reasoning_content": PROBE_SYSTEM["content"]}
        written = self._probe((PROBE_QUESTION, reply), (), prompt=False).rpartition(_PROBE)[0]
        between = written.partition(PROBE_SYSTEM["content"])[2]
        ids = self._tokenizer.encode(self.turn_end.lstrip(), add_special_tokens=False)
        added = self._tokenizer.added_tokens_decoder
        is_end = bool(ids) and ids[0] in added and added[ids[0]].content not in between
        return (added[ids[0]].content, ids[0]) if is_end else None

    @cached_property
    def _omits_content(self) -> bool:
        """True if the template does not write the text of a question, such as one that expects parts."""
        try:
            return PROBE_QUESTION["content"] not in self._render([PROBE_QUESTION], (), prompt=True)
        except TooCostlyTemplateError:
            raise
        except UsageError:
            return False

    def _probe(self, messages: Sequence[Message], tools: Sequence[Tool], *, prompt: bool) -> str:
        """Return the text of messages without escape marks, or "" if the template rejects the messages."""
        try:
            return self._render([dict(message) for message in messages], tools, prompt=prompt)
        except TooCostlyTemplateError:
            raise  # this template would also take too long for other messages
        except UsageError:
            return ""

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[Tool], *, prompt: bool) -> str:
        if not self._tokenizer.chat_template:
            raise UsageError(
                f"cannot render messages: the tokenizer of {self._model_path} has no chat template",
                code="BK-TEMPLATE",
                hint="use a chat model, or add a chat_template.jinja to the model's folder",
            )
        from buckeye.inference.render import template_sandbox

        offered = [dict(tool) for tool in tools] or None
        try:
            template = _compiled(self._tokenizer.get_chat_template(tools=offered))
            return template.render(
                messages,
                tools=offered,
                documents=None,
                add_generation_prompt=prompt,
                date_string=template_sandbox.DATE_STRING,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template is a program, which may fail in any way
            kind = (
                TooCostlyTemplateError if isinstance(error, template_sandbox.TooCostlyError) else UsageError
            )
            raise kind(
                f"the chat template of {self._model_path} cannot render these messages: {_with_line(error)}",
                code="BK-TEMPLATE",
            ) from error


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    from buckeye.inference.render.template_sandbox import SandboxedTemplate

    return SandboxedTemplate(source)


def _with_line(error: Exception) -> str:
    """Return the text of an error, with the number of the template's line that raised it."""
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    message = str(error) or type(error).__name__
    return message if line is None else f"line {line}: {message}"


def starts_reasoning(prompt: str) -> bool:
    """Return True if the prompt ends with `<think>`, so that the reply starts inside the reasoning."""
    return prompt.rstrip().endswith("<think>")


def _with_text(message: Message, number: int) -> Message:
    """Return the message with its content as one text.

    Raise `UsageError` for a message without a role, and for content that is not text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UsageError(
            f"message {number} has no role",
            code="BK-TEMPLATE",
            hint='write it as {"role": "user", "content": "..."}',
        )
    message = join_text_parts(message)
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    problem = f"it is {type(content).__name__}, not text"
    if isinstance(content, list | tuple) and (part := find_non_text_part(content)) is not None:
        problem = f"part {part[0]} is {part[1]}, not text"
    raise UsageError(
        f"content of message {number} ({message.get('role')}): {problem}",
        code="BK-TEMPLATE",
        hint="use text only: images and audio are not supported",
    )


def readable(message: Message) -> dict[str, Any]:
    """Return a message in the form that templates expect, with arguments of calls as objects.

    If the arguments of a call are not a JSON object, write all calls of the message into its content.
    """
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
    try:
        return {**call, "function": {**function, "arguments": read_arguments(function["arguments"])}}
    except ValueError:
        return dict(call)
