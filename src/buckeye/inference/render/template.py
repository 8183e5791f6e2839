"""A model's chat template: messages to text, and what the template can say."""

from __future__ import annotations

import json
import os
import re
import traceback
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from buckeye.envs.base import Message, Tool
from buckeye.errors import UsageError

# Tools for chat templates that know none: everything about them is written into system, user and assistant
# texts, in the `<tool_call>` form that most open models were taught.

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
    """The same conversation in messages that have a role and a text, and nothing else."""
    plain: list[dict[str, Any]] = []
    in_results = False
    for message in messages:
        if message["role"] != "tool":
            plain.append(fold_calls(message))
        elif in_results:
            plain[-1]["content"] += "\n" + _result(message)
        else:
            plain.append({"role": "user", "content": _result(message)})
        in_results = message["role"] == "tool"
    return _with_tools(plain, tools) if tools else plain


def fold_calls(message: Message) -> dict[str, Any]:
    """A message whose calls are text of its content. Raises `UsageError` for content that is no text."""
    content = message.get("content")
    if not isinstance(content, str | None):
        raise UsageError(f"the content of a message is {type(content).__name__}; it has to be a text")
    folded = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
    folded["content"] = "\n".join([text for text in (content,) if text] + calls)
    return folded


def _call(function: Mapping[str, Any]) -> str:
    name, arguments = function["name"], function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    # A call without a name is what the model wrote and nobody could read: it is repeated as it was.
    body = (
        f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}' if name else arguments
    )
    return f"<tool_call>\n{body}\n</tool_call>"


def _result(message: Message) -> str:
    return f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _TOOLS.format(tools=listed)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


# Words in a message stay words: `<|im_end|>` that a user or a tool wrote ends no turn.
#
# Tokenizers find their control tokens anywhere in a text, and a chat template makes one text of what it
# writes itself and of what others wrote. So a sign that no text has is put into every name of a control token
# that stands in a message, before the template sees it. Where a text is encoded, it is cut at that sign: no
# piece has the whole name, and the pieces together are the words.

MARK = "\ufdd0"
"""A code point that stands for no character, and never will."""
SWITCH = "BUCKEYE_CONTROL_TOKENS_IN_TEXT"
"""The environment variable that lets control tokens in messages be control tokens, set to 1."""

_OF_REPLIES = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
"""What assistants write themselves in their replies, and data sets in theirs."""
_WRITTEN_HERE = _OF_REPLIES | {"<tool_response>", "</tool_response>", "<tools>", "</tools>"}
"""What is written around tools and calls for templates that know none."""
_BARS = re.compile(r"\S*[<\[][|｜].*|.*[|｜][>\]]\S*", re.DOTALL)
_TAG = re.compile(r"<\S+>|\[\S+\]")


class Literal:
    """Keeps the names of a tokenizer's control tokens in messages from being read as such."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        known = [token for token in tokenizer.added_tokens_decoder.values() if len(token.content) > 1]
        written = str(tokenizer.chat_template)
        names = {one.content for one in known if one.special or _controls(one.content, written)}
        if os.environ.get(SWITCH) == "1":
            names = set()
        self._anywhere, self._in_replies = _pattern(names), _pattern(names - _OF_REPLIES)

    def marked(self, message: Message) -> dict[str, Any]:
        """A message whose texts are words to `encode`; its role is left as it is."""
        pattern = self._in_replies if message.get("role") == "assistant" else self._anywhere
        if pattern is None:
            return dict(message)
        return {key: item if key == "role" else _marked(item, pattern) for key, item in message.items()}

    def marked_tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        """The description of a tool, which its server wrote."""
        return dict(tool) if self._anywhere is None else _marked(dict(tool), self._anywhere)

    def encode(self, text: str) -> list[int]:
        """The token ids of what a template made of marked messages, none added around them."""
        if MARK not in text:
            return self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for piece in filter(None, text.split(MARK)):
            ids += self._continued(piece) if ids else self._tokenizer.encode(piece, add_special_tokens=False)
        return ids

    def _continued(self, piece: str) -> list[int]:
        """The ids of a piece that does not begin a text: some tokenizers put a space before one that does."""
        before = self._tokenizer.encode(_ANCHOR, add_special_tokens=False)
        after = self._tokenizer.encode(_ANCHOR + piece, add_special_tokens=False)
        if after[: len(before)] == before:
            return after[len(before) :]
        return self._tokenizer.encode(piece, add_special_tokens=False)


def _controls(token: str, template: str) -> bool:
    """Whether a token that its tokenizer does not call special is a control token all the same: by its bars,
    or as a tag that the chat template writes. Other tags, such as `<answer>`, are words of a task."""
    if _BARS.fullmatch(token):
        return True
    return bool(_TAG.fullmatch(token)) and (token in template or token in _WRITTEN_HERE)


_ANCHOR = "\n"


def _pattern(names: set[str]) -> re.Pattern[str] | None:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if names else None


def _marked(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], value)
    if isinstance(value, Mapping):
        return {_marked(key, pattern): _marked(item, pattern) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(item, pattern) for item in value]
    return value


# A model's chat template: messages to text, and what the template can say.

_PROBE = "buckeye"
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


class TooCostlyTemplateError(UsageError):
    """A chat template that takes too long, or makes too much text."""


class ChatTemplate:
    """The chat template of a tokenizer. Where it knows no tools, they are written into plain messages."""

    def __init__(self, tokenizer: Any, model_path: str) -> None:
        self._tokenizer = tokenizer
        self._model_path = model_path
        self.literal = Literal(tokenizer)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, prompt: bool) -> str:
        """The text of messages, with `prompt` up to where the next assistant message begins; for
        `literal.encode`.

        Raises `UsageError` if the template refuses, or if there is none.
        """
        messages = [self.literal.marked(message) for message in messages]
        tools = [self.literal.marked_tool(tool) for tool in tools]
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
        except TooCostlyTemplateError:
            raise  # and so would all others
        except UsageError:
            return ""

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[Tool], *, prompt: bool) -> str:
        if not self._tokenizer.chat_template:
            raise UsageError(
                f"The tokenizer of {self._model_path} has no chat template, so it cannot render messages."
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
                date_string=template_sandbox.TODAY.strftime("%d %b %Y"),
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template is a program, which may fail in any way
            kind = (
                TooCostlyTemplateError if isinstance(error, template_sandbox.TooCostlyError) else UsageError
            )
            raise kind(
                f"The chat template of {self._model_path} cannot render these messages: {_reason(error)}"
            ) from error


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    from buckeye.inference.render.template_sandbox import Template

    return Template(source)


def _reason(error: Exception) -> str:
    """What is wrong, and in which line of the template."""
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    said = str(error) or type(error).__name__
    return said if line is None else f"line {line}: {said}"


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
