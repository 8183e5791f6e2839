"""Chat messages to token ids and back, without re-tokenizing sampled tokens.

Also forced tool calls, which start a reply with given text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from buckeye.base.storage import utf8
from buckeye.envs.base import Message, Tool
from buckeye.errors import UsageError
from buckeye.inference.engine.architecture import eos_token_ids
from buckeye.inference.render.families import FamilyParser, find_family
from buckeye.inference.render.parse_reply import (
    ParsedMessage,
    count_calls,
    parse_bare_call,
    parse_tagged_calls,
    split_reasoning,
    to_openai_message,
)
from buckeye.inference.render.template import ChatTemplate, starts_reasoning
from buckeye.inference.render.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

TEXT_CALL_FAMILIES = (None, "qwen3", "prime-qwen3", "llama-3")
"""Families that write reasoning and calls as plain text of a reply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Prompt of a conversation.

    `ids` are the engine's input, with earlier replies exactly as sampled. `text` is the chat template's
    rendering of `messages` and `tools`, up to the next reply.
    """

    ids: list[int]
    text: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


class ChatRenderer:
    """Tokenizer and chat template of a model (a local directory or a Hub id)."""

    def __init__(self, model_path: str | Path) -> None:
        self.model_path = str(model_path)
        self.tokenizer = load_tokenizer(self.model_path)
        self.template = ChatTemplate(self.tokenizer, self.model_path)
        if self.template.missing_header:
            log.warning(
                "The chat template of %s ignores add_generation_prompt: prompts get the reply header %r",
                self.model_path,
                self.template.missing_header,
            )
        self.token_text = lru_cache(maxsize=1 << 16)(self._token_text)
        self.stop_token_ids = self._find_stop_token_ids()
        """All tokens that end an assistant's turn: the tokenizer's and the template's."""

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids of the tokenizer."""
        return len(self.tokenizer)

    @cached_property
    def family(self) -> FamilyParser | None:
        """Reply parser of `renderers`, or None if it does not support this template."""
        return find_family(self.tokenizer, self.model_path, self.template)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Conversation:
        """Return the prompt for the next assistant message.

        Raise `UsageError` if the template rejects the messages.
        """
        text = self.prompt_text(messages, tools)
        return Conversation(ids=self.encode(text), text=text, messages=tuple(messages), tools=tuple(tools))

    def prompt_text(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the text of the prompt. Raise `UsageError` if the template rejects the messages."""
        return self.template.text(messages, tools, prompt=True)

    def extend(
        self,
        conversation: Conversation,
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> Conversation | None:
        """Return the next turn's prompt.

        It has the earlier ids, the sampled ids, and the newly tokenized text after them.

        None if a prompt rendered from scratch would differ: the template drops part of the earlier turns
        (Qwen3 drops reasoning after the next user message), or `messages` are not the earlier ones, the
        sampled reply, and more. Differences in spacing or key order of a call's JSON do not count.
        """
        text = self.template.text(messages, tools, prompt=True)
        position = len(conversation.messages)
        if not text.startswith(conversation.text) or len(messages) <= position:
            return None
        reply = self.parse(conversation, sampled_ids)
        if messages[position] != reply:
            as_sampled = [*messages[:position], reply, *messages[position + 1 :]]
            if self.template.text(as_sampled, tools, prompt=True) != text:
                return None
        following = self._after_reply(
            text[len(conversation.text) :], self.template.escaper.escape_message(reply)
        )
        if following is None:
            return None
        end, rest = following
        ended = bool(sampled_ids) and sampled_ids[-1] in self.stop_token_ids
        ids = [*conversation.ids, *sampled_ids, *self.encode(rest if ended else end + rest)]
        return Conversation(ids=ids, text=text, messages=tuple(messages), tools=tuple(tools))

    def parse(self, conversation: Conversation, sampled_ids: Sequence[int]) -> dict[str, Any]:
        """Return the sampled reply as an assistant message.

        It has `content`, `reasoning_content` if the template supports reasoning, and `tool_calls` if tools
        were offered and called.

        An unreadable call has the name "" and the original text as its arguments. Never raises.
        """
        parsed = None
        if self.family is not None:
            parsed = self.family.parse(sampled_ids, conversation.ids, conversation.tools)
        if parsed is None:
            parsed = self._parse_text(conversation, self.decode(self._without_stop(sampled_ids)))
        return to_openai_message(parsed, first_call=count_calls(conversation.messages))

    def parse_text(self, conversation: Conversation, text: str) -> dict[str, Any]:
        """Return a reply's text as an assistant message, for a reply that a stop string has cut.

        An unreadable call has the name "" and the original text as its arguments.
        """
        parsed = self._parse_text(conversation, text)
        return to_openai_message(parsed, first_call=count_calls(conversation.messages))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text.

        Special tokens are recognized except in marked text; none are added.
        """
        return self.template.escaper.encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a text that the model continues.

        They include the tokens that the tokenizer adds before it.
        """
        return self.tokenizer.encode(utf8(text).decode(), add_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included. Invalid UTF-8 becomes U+FFFD."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _parse_text(self, conversation: Conversation, text: str) -> ParsedMessage:
        reasoning = None
        if self.template.supports_reasoning:
            reasoning, text = split_reasoning(text, opened=starts_reasoning(conversation.text))
        parsed = ParsedMessage(content=text)
        if conversation.tools:
            parsed = (
                parse_bare_call(text) if self.template.call_format == "json" else parse_tagged_calls(text)
            )
        return ParsedMessage(content=parsed.content, reasoning=reasoning, calls=parsed.calls)

    def _after_reply(self, text: str, reply: Message) -> tuple[str, str] | None:
        """Split `text`, which starts with the reply, into the end-of-turn token and the rest.

        None if it does not contain the whole reply.
        """
        if self.template.end_of_turn is None:
            return None
        end, _ = self.template.end_of_turn
        written, separator, rest = text.partition(end)
        content, reasoning = ((reply.get(key) or "").strip() for key in ("content", "reasoning_content"))
        # Reasoning precedes the content, which may contain equal text.
        before = written.rpartition(content)[0] if content else written
        if not separator or content not in written or reasoning not in before:
            return None
        return end, rest

    def _without_stop(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids

    def _token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def _find_stop_token_ids(self) -> tuple[int, ...]:
        end = self.template.end_of_turn
        tokens = [
            self.tokenizer.eos_token_id,
            *eos_token_ids({}, Path(self.model_path)),
            end[1] if end else None,
        ]
        return tuple(dict.fromkeys(token for token in tokens if token is not None))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyStart:
    """Given start of a reply; `ids` are the tokens of `text`."""

    text: str = ""
    ids: tuple[int, ...] = ()


EMPTY_REPLY_START = ReplyStart()
"""Start of a reply that the model starts itself."""


def call_start(renderer: ChatRenderer, conversation: Conversation, name: str | None) -> ReplyStart:
    """Return the start of a call of the tool `name`, or of any tool with None.

    It leaves no room for reasoning. Raise `UsageError` for a family that does not write calls as text.
    """
    family, template = renderer.family, renderer.template
    if (family.name if family else None) not in TEXT_CALL_FAMILIES:
        raise UsageError(
            "`tool_choice` cannot force a call of this model: its family does not write calls as text",
            code="BK-INFERENCE-REQUEST",
            hint="use auto or none",
        )
    thought = ""
    if starts_reasoning(conversation.text):
        thought = "\n</think>\n\n"
    elif template.supports_reasoning:
        thought = "<think>\n\n</think>\n\n"
    bare = template.call_format == "json"
    tag, arguments = ("", "parameters") if bare else ("<tool_call>\n", "arguments")
    # No space at the end: in most tokenizers it belongs to the next token.
    rest = ' "' if name is None else f' {json.dumps(name, ensure_ascii=False)}, "{arguments}":'
    text = f'{thought}{tag}{{"name":{rest}'
    return ReplyStart(text=text, ids=tuple(renderer.encode(text)))
