"""Keep words in a message words: a control token that a user or a tool wrote ends no turn.

Tokenizers find their control tokens anywhere in a text, and a chat template makes one text of what it
writes itself and of what others wrote. So a sign that no text has is put into every name of a control token
that stands in a message, before the template sees it. Where a text is encoded, it is cut at that sign: no
piece has the whole name, and the pieces together are the words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from buckeye.base.storage import utf8
from buckeye.envs.base import Message

MARK = "\ufdd0"
"""A code point that stands for no character, and never will."""

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
        text = utf8(text).decode()
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
