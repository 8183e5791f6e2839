"""Conversion of chat messages to token ids, and of sampled token ids to messages.

Sampled tokens are never tokenized again. `call_start` forces a tool call by starting the reply for the model.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import msgspec

from buckeye.base.storage import utf8
from buckeye.envs.base import Message, Tool
from buckeye.errors import UsageError
from buckeye.inference.engine.architecture import eos_token_ids, read_model_config
from buckeye.inference.render.families import FamilyParser, find_family
from buckeye.inference.render.parse_reply import (
    ParsedMessage,
    count_calls,
    split_reasoning,
    to_openai_message,
)
from buckeye.inference.render.template import ChatTemplate, starts_reasoning
from buckeye.inference.render.tokenizer import load_tokenizer, rust_tokenizer
from buckeye.inference.types import TokenIds

log = logging.getLogger(__name__)

_PROMPTS_KEPT = 16  # rollouts of a group, which start one after another, have equal first prompts

TEXT_CALL_FAMILIES = (None, "qwen3", "prime-qwen3", "llama-3")
"""Families whose models write reasoning and tool calls as plain text. None is a model of no known family."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Prompt of a conversation.

    `ids` are the token ids of the prompt. They contain the sampled token ids of earlier replies unchanged.
    `text` is the text that the chat template makes of `messages` and `tools`, up to the next reply.
    """

    ids: TokenIds
    text: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


class ChatRenderer:
    """Tokenizer and chat template of a model. `model_path` is a local directory or a Hub id."""

    def __init__(self, model_path: str | Path) -> None:
        self.model_path = str(model_path)
        self.tokenizer = load_tokenizer(self.model_path)
        self._rust = rust_tokenizer(self.tokenizer)
        self.template = ChatTemplate(self.tokenizer, self.model_path)
        if self.template.missing_header:
            log.warning(
                "The chat template of %s ignores add_generation_prompt; prompts get the reply header %r",
                self.model_path,
                self.template.missing_header,
            )
        self.token_text = lru_cache(maxsize=1 << 16)(self._token_text)
        self._rendered = lru_cache(maxsize=_PROMPTS_KEPT)(self._render_json)
        self.stop_token_ids = self._find_stop_token_ids()
        """Ids of all tokens that end a reply, from the tokenizer, generation_config.json and the template."""

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids of the tokenizer."""
        return len(self.tokenizer)

    @cached_property
    def family(self) -> FamilyParser | None:
        """Reply parser of the library `renderers`, or None if the library does not support this template."""
        return find_family(self.tokenizer, self.model_path, self.template)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Conversation:
        """Return the prompt for the next assistant message.

        Raise `UsageError` if the template rejects the messages.
        """
        try:
            key = msgspec.json.encode((messages, tools))
        except (TypeError, ValueError, OverflowError):  # the values of a program are not always JSON
            text = self.prompt_text(messages, tools)
            ids = self.encode(text)
        else:
            text, kept = self._rendered(key)
            ids = list(kept)
        return Conversation(ids=ids, text=text, messages=tuple(messages), tools=tuple(tools))

    def prompt_text(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the text of the prompt. Raise `UsageError` if the template rejects the messages."""
        return self.template.text(messages, tools, prompt=True)

    def extend(
        self,
        conversation: Conversation,
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        reply: Message | None = None,
    ) -> Conversation | None:
        """Return the prompt of the next turn, without tokenizing earlier turns again.

        The ids are those of `conversation`, the sampled ids, and the ids of the text after the reply.
        `messages` must be the messages of `conversation`, the sampled reply, and later messages. In the JSON
        of a call, spaces and the order of keys may differ. `reply` is the message of the sampled ids, if it
        is known.

        Return None if the text of the template for `messages` does not continue the earlier prompt and reply.
        For example, Qwen3's template drops the reasoning of earlier turns.
        """
        text = self.template.text(messages, tools, prompt=True)
        position = len(conversation.messages)
        if not text.startswith(conversation.text) or len(messages) <= position:
            return None
        reply = self.parse(conversation, sampled_ids) if reply is None else reply
        if messages[position] != reply:
            as_sampled = [*messages[:position], reply, *messages[position + 1 :]]
            if self.template.text(as_sampled, tools, prompt=True) != text:
                return None
        stop = self.decode(sampled_ids[-1:]) if self._without_stop(sampled_ids) != sampled_ids else None
        start = len(conversation.text)
        head = self._head_of_turn(text, start, messages, tools, position)
        escaped = self.template.escaper.escape_message(reply)
        following = self._after_reply(text[start:], head - start, escaped, stop)
        if following is None:
            return None
        end, rest = following
        ids = [*conversation.ids, *sampled_ids, *self.encode(rest if stop is not None else end + rest)]
        return Conversation(ids=ids, text=text, messages=tuple(messages), tools=tuple(tools))

    def parse(
        self, conversation: Conversation, sampled_ids: Sequence[int], text: str | None = None
    ) -> dict[str, Any]:
        """Return the sampled reply as an assistant message. `text` is the text of the ids, if it is known.

        The message has `content`. It has `reasoning_content` if the template supports reasoning, and
        `tool_calls` if the conversation has tools and the model called one.

        An unreadable call has the name "" and its text as arguments. No reply raises an error.
        """
        parsed = None
        if self.family is not None:
            parsed = self.family.parse(sampled_ids, list(map(int, conversation.ids)), conversation.tools)
        if parsed is None:
            if text is None:
                text = self.decode(self._without_stop(sampled_ids))
            parsed = self._parse_text(conversation, text)
        return to_openai_message(parsed, first_call=count_calls(conversation.messages))

    def parse_text(self, conversation: Conversation, text: str) -> dict[str, Any]:
        """Return the text of a reply as an assistant message. Use this for a reply that a stop string ended.

        An unreadable call has the name "" and its text as arguments.
        """
        parsed = self._parse_text(conversation, text)
        return to_openai_message(parsed, first_call=count_calls(conversation.messages))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text.

        The text of a special token becomes this token, unless it contains an escape mark. No special tokens
        are added.
        """
        return self.template.escaper.encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt without chat template.

        They include the special tokens that the tokenizer adds, such as a beginning-of-text token.
        """
        return self.tokenizer.encode(utf8(text).decode(), add_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included. Invalid UTF-8 becomes U+FFFD."""
        if self._rust is None:
            return self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return str(self._rust.decode(list(ids), skip_special_tokens=False))

    def decode_in_thread(self, ids: Sequence[int]) -> str:
        """Return the text of token ids as `decode` does. Other threads run during a long decode."""
        if self._rust is None:
            return self.decode(ids)
        (text,) = self._rust.decode_batch([list(ids)], skip_special_tokens=False)
        return str(text)

    def _render_json(self, key: bytes) -> tuple[str, TokenIds]:
        messages, tools = msgspec.json.decode(key)
        text = self.prompt_text(messages, tools)
        return text, tuple(self.encode(text))

    def _parse_text(self, conversation: Conversation, text: str) -> ParsedMessage:
        reasoning = None
        if self.template.supports_reasoning:
            reasoning, text = split_reasoning(text, opened=starts_reasoning(conversation.text))
        parsed = ParsedMessage(content=text)
        if conversation.tools:
            parsed = self.template.call_format.parse(text, conversation.tools)
        return ParsedMessage(content=parsed.content, reasoning=reasoning, calls=parsed.calls)

    def _head_of_turn(
        self, text: str, start: int, messages: Sequence[Message], tools: Sequence[Tool], position: int
    ) -> int:
        """Return the length of `text` up to the content of the message after the reply at `position`.

        The reply begins at `start`. Another content of this message changes the text only from the returned
        place on. Return 0 if the content is not in `text`.
        """
        later = messages[position + 1 :]
        if later and isinstance(later[0].get("content"), str):
            content = self.template.escaper.escape_message(later[0])["content"].rstrip()
            if content and text.count(content, start) == 1:  # no second rendering is needed to find it
                return text.index(content, start)
        other = [{**message, "content": f"·{message.get('content') or ''}"} for message in later[:1]]
        try:
            changed = self.template.text(
                [*messages[: position + 1], *other, *later[1:]], tools, prompt=bool(later)
            )
        except UsageError:
            return 0
        common = len(os.path.commonprefix([text, changed]))  # noqa: RUF071, characters are meant
        return 0 if later and common == len(text) else common

    def _after_reply(self, text: str, head: int, reply: Message, stop: str | None) -> tuple[str, str] | None:
        """Return the token that ends the reply, and the text after this token.

        `text` starts with the reply. Its first `head` characters are before the content of the next message.
        `stop` is the stop token that was sampled. Return None if `text` does not contain the whole reply, or
        not its end.
        """
        usual = self.template.end_of_turn
        ends = [end for end in (stop, usual and usual[0]) if end is not None]
        end, at = next(((end, at) for end in ends if (at := text.rfind(end, 0, max(0, head))) >= 0), ("", 0))
        if not end:
            return None
        written = text[:at]
        content, reasoning = ((reply.get(key) or "").strip() for key in ("content", "reasoning_content"))
        # Search the reasoning only before the content, because the content may contain the reasoning's text.
        before = written.rpartition(content)[0] if content else written
        if content not in written or reasoning not in before:
            return None
        return end, text[at + len(end) :]

    def _without_stop(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids

    def _token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def _find_stop_token_ids(self) -> tuple[int, ...]:
        end, folder = self.template.end_of_turn, Path(self.model_path)
        config = read_model_config(folder / "config.json") if (folder / "config.json").is_file() else {}
        tokens = [self.tokenizer.eos_token_id, *eos_token_ids(config, folder), end[1] if end else None]
        size = config.get("vocab_size")  # the model cannot sample a larger id, and engines reject it
        limit = size if isinstance(size, int) else math.inf
        return tuple(dict.fromkeys(token for token in tokens if token is not None and token < limit))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyStart:
    """Text that a reply must start with, and its token ids."""

    text: str = ""
    ids: tuple[int, ...] = ()


EMPTY_REPLY_START = ReplyStart()
"""Start of a reply that the model writes completely."""


def call_start(renderer: ChatRenderer, conversation: Conversation, name: str | None) -> ReplyStart:
    """Return the start of a reply that calls the tool `name`. If `name` is None, the model chooses the tool.

    The reply has no reasoning. Raise `UsageError` for a family that does not write calls as text.
    """
    family, template = renderer.family, renderer.template
    if (family.name if family else None) not in TEXT_CALL_FAMILIES:
        raise UsageError(
            "`tool_choice` cannot force a tool call, because this model does not write calls as text",
            code="BK-INFERENCE-REQUEST",
            hint='set `tool_choice` to "auto" or "none"',
        )
    thought = ""
    if starts_reasoning(conversation.text):
        thought = "\n</think>\n\n"
    elif template.supports_reasoning:
        thought = "<think>\n\n</think>\n\n"
    # No space at the end, because most tokenizers have a space at the start of a token.
    text = thought + template.call_format.start(name)
    return ReplyStart(text=text, ids=tuple(renderer.encode(text)))
