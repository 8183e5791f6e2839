"""Incremental parsing of an assistant's message.

Reasoning and content are streamed; calls follow at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from buckeye.inference.engine.detokenizer import partial_length
from buckeye.inference.render import ChatRenderer, Conversation
from buckeye.inference.render.parse_reply import split_reasoning
from buckeye.inference.render.renderer import EMPTY_REPLY_START, ReplyStart
from buckeye.inference.render.template import starts_reasoning

_THINK, _END_THINK, _CALL = "<think>", "</think>", "<tool_call>"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyPart:
    """Part of a reply that will not change. `calls`, in OpenAI's format, come with the last part."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[dict[str, Any], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class StreamingReplyParser:
    """Parser of a reply's text in pieces. The joined parts do not depend on the sizes of the pieces.

    If tools were offered, text is held back where a call may begin. The reply starts with `reply_start`.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        conversation: Conversation,
        *,
        reply_start: ReplyStart = EMPTY_REPLY_START,
        first_call_only: bool,
    ) -> None:
        template = renderer.template
        self._renderer = renderer
        self._conversation = conversation
        self._first_call_only = first_call_only
        self._supports_reasoning = template.supports_reasoning
        self._starts_reasoning = starts_reasoning(conversation.text)
        self._calls = template.call_format if conversation.tools else None
        self._text = ""
        self._reasoning = self._content = ""
        """Reasoning and content released before."""
        self.feed(reply_start.text)

    def feed(self, text: str) -> ReplyPart:
        """Process text and return the part that is now certain."""
        self._text += text
        reasoning, content = self._certain_parts()
        part = ReplyPart(reasoning=reasoning[len(self._reasoning) :], content=content[len(self._content) :])
        self._reasoning, self._content = reasoning, content
        return part

    def finish(self, text: str) -> ReplyPart:
        """Process the last text; return the remaining part and the calls."""
        self._text += text
        message = self._renderer.parse_text(self._conversation, self._text)
        calls = tuple(message.get("tool_calls", ()))
        reasoning, content = message.get("reasoning_content") or "", message["content"]
        released = self._content.lstrip() if calls else self._content
        return ReplyPart(
            reasoning=reasoning[len(self._reasoning) :],
            content=content[len(released) :] if content.startswith(released) else "",
            calls=calls[: 1 if self._first_call_only else None],
        )

    def _certain_parts(self) -> tuple[str, str]:
        """Return the reasoning and the content that later text cannot change."""
        body = self._text.lstrip()
        if not self._supports_reasoning:
            return "", self._certain_content(self._text)
        if _THINK.startswith(body):
            return "", ""
        if (body.startswith(_THINK) or self._starts_reasoning) and _END_THINK not in body:
            markers = (_END_THINK, _CALL) if self._calls == "tagged" else (_END_THINK,)
            body = body.removeprefix(_THINK)
            return body[: _certain_length(body, markers)].strip("\n"), ""
        reasoning, content = split_reasoning(self._text, opened=self._starts_reasoning)
        return reasoning or "", self._certain_content(content)

    def _certain_content(self, content: str) -> str:
        if self._calls is None:
            return content
        if self._calls == "json":  # a call is one JSON object; any other text is content
            body = content.lstrip()
            return "" if not body or body.startswith("{") else content
        return content[: _certain_length(content, (_CALL,))].rstrip()


def _certain_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of `text` before the first marker, or before an end that may become one."""
    positions = [position for marker in markers if (position := text.find(marker)) >= 0]
    return min(positions, default=len(text) - partial_length(text, markers))
