"""Escaping of control tokens in messages, so that a message with the text `<|im_end|>` does not end its turn.

A tokenizer turns the name of a control token into this token at any place in a text. So, before the
template is rendered, `ControlTokenEscaper` inserts a mark into every such name in a message. After rendering,
`ControlTokenEscaper.encode` splits the text at the marks, so that no piece contains a whole name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from buckeye.base.storage import utf8
from buckeye.envs.base import Message
from buckeye.inference.render.tokenizer import rust_tokenizer

ESCAPE_MARK = "\ufdd0"
"""Unicode noncharacter, which does not occur in text."""

REPLY_TOKENS = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
"""Tokens that assistants write in replies. In assistant messages they stay control tokens."""
_KNOWN_TAGS = REPLY_TOKENS | {"<tool_response>", "</tool_response>", "<tools>", "</tools>"}
"""`REPLY_TOKENS`, and the tags that `tools_as_text` writes around tools and results."""
_ANCHOR = "\n"
_BARS = re.compile(r"\S*[<\[][|｜].*|.*[|｜][>\]]\S*", re.DOTALL)
_TAG = re.compile(r"<\S+>|\[\S+\]")


class ControlTokenEscaper:
    """Escaper that makes the names of control tokens in messages tokenize as plain text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._rust = rust_tokenizer(tokenizer)
        tokens = [token for token in tokenizer.added_tokens_decoder.values() if len(token.content) > 1]
        template = str(tokenizer.chat_template)
        names = {t.content for t in tokens if t.special or _is_control_token(t.content, template)}
        self._anywhere, self._in_replies = _compile_pattern(names), _compile_pattern(names - REPLY_TOKENS)

    def escape_message(self, message: Message) -> dict[str, Any]:
        """Return a message with marks in all its texts, except in its role."""
        pattern = self._in_replies if message.get("role") == "assistant" else self._anywhere
        return {key: item if key == "role" else _mark(item, pattern) for key, item in message.items()}

    def escape_tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        """Return a tool with marks in all its texts."""
        return _mark(dict(tool), self._anywhere)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that may contain marks. No special tokens are added."""
        text = utf8(text).decode()
        if ESCAPE_MARK not in text:
            return self._encode_piece(text)
        ids: list[int] = []
        for piece in filter(None, text.split(ESCAPE_MARK)):
            ids += self._encode_continuation(piece) if ids else self._encode_piece(piece)
        return ids

    def _encode_piece(self, text: str) -> list[int]:
        rust = self._rust
        if rust is None or rust.truncation or rust.padding or rust.encode_special_tokens:
            return self._tokenizer.encode(text, add_special_tokens=False)
        return rust.encode(text, add_special_tokens=False).ids

    def _encode_continuation(self, piece: str) -> list[int]:
        """Return the token ids of text in the middle of a text.

        Some tokenizers add a space before the first word. The ids do not contain this space.
        """
        before = self._encode_piece(_ANCHOR)
        after = self._encode_piece(_ANCHOR + piece)
        if after[: len(before)] == before:
            return after[len(before) :]
        return self._encode_piece(piece)


def _is_control_token(token: str, template: str) -> bool:
    """Return True if an added token is a control token, although the tokenizer does not mark it as special.

    A control token has bars (`<|...|>`), or is a tag that the chat template writes. Other tags, such as
    `<answer>`, are text of a task.
    """
    if _BARS.fullmatch(token):
        return True
    return bool(_TAG.fullmatch(token)) and (token in template or token in _KNOWN_TAGS)


def _compile_pattern(names: set[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # (?!) matches nothing


def _mark(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda match: match[0][0] + ESCAPE_MARK + match[0][1:], value)
    if isinstance(value, Mapping):
        return {_mark(key, pattern): _mark(item, pattern) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mark(item, pattern) for item in value]
    return value
