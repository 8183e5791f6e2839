"""Parser that splits a streamed reply into reasoning, content and tool calls.

Reasoning and content are returned while the model samples. Tool calls are returned at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from buckeye.inference.engine.detokenizer import partial_length
from buckeye.inference.render import ChatRenderer, Conversation
from buckeye.inference.render.call_format import CallFormat
from buckeye.inference.render.renderer import EMPTY_REPLY_START, TEXT_CALL_FAMILIES, ReplyStart
from buckeye.inference.render.template import starts_reasoning

_THINK, _END_THINK = "<think>", "</think>"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyPart:
    """Part of a reply that later tokens cannot change. Only the last part has `calls`, in OpenAI's format."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[dict[str, Any], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class StreamingReplyParser:
    """Parser of a reply that arrives in pieces. The parts, joined, do not depend on the sizes of the pieces.

    If the request has tools, the parser holds back text at which a call may begin. If the model's reasoning
    and calls are special tokens instead of text, the parser returns nothing before the end. The reply starts
    with `reply_start`.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        conversation: Conversation,
        *,
        reply_start: ReplyStart = EMPTY_REPLY_START,
        first_call_only: bool,
    ) -> None:
        family, template = renderer.family, renderer.template
        self._renderer = renderer
        self._conversation = conversation
        self._first_call_only = first_call_only
        self._as_text = (family.name if family else None) in TEXT_CALL_FAMILIES
        self._starts_reasoning = starts_reasoning(conversation.text)
        self._calls = template.call_format if conversation.tools else None
        self._state: Literal["start", "reasoning", "content", "held"] = (
            "start" if template.supports_reasoning else "content"
        )
        self._pending = ""
        self._begun = False
        """True if the current reasoning or content has text after its leading line breaks."""
        self._after_reasoning = False
        self._released = ""
        """Content that earlier calls returned."""
        self._reply_start = reply_start
        self.feed(reply_start.text)

    def feed(self, text: str) -> ReplyPart:
        """Process new text. Return the part of the reply that later text cannot change."""
        self._pending += text
        if not self._as_text:
            return ReplyPart()
        reasoning = content = ""
        if self._state == "start":
            self._start()
        if self._state == "reasoning":
            reasoning = self._take_reasoning()
        if self._state == "content":
            content = self._take_content()
        self._released += content
        return ReplyPart(reasoning=reasoning, content=content)

    def finish(self, text: str, sampled_ids: Sequence[int], *, cut: str | None) -> ReplyPart:
        """Process the last text. Return the rest of the reply, with its calls.

        If a stop string has ended the reply, `cut` is the whole text before the stop string. `sampled_ids`
        then has tokens after the end of this text.
        """
        part, rest = self.feed(text), self._rest(sampled_ids, cut)
        return ReplyPart(
            reasoning=part.reasoning + rest.reasoning, content=part.content + rest.content, calls=rest.calls
        )

    def _rest(self, sampled_ids: Sequence[int], cut: str | None) -> ReplyPart:
        if cut is None:
            message = self._renderer.parse(self._conversation, [*self._reply_start.ids, *sampled_ids])
        else:
            message = self._renderer.parse_text(self._conversation, self._reply_start.text + cut)
        calls = tuple(message.get("tool_calls", ()))[: 1 if self._first_call_only else None]
        if not self._as_text:
            reasoning = message.get("reasoning_content") or ""
            return ReplyPart(reasoning=reasoning, content=message["content"], calls=calls)
        if self._state == "reasoning" or (self._state == "start" and self._starts_reasoning):
            # a call inside the reasoning ends the reasoning
            rest = "" if calls else self._pending
            return ReplyPart(reasoning=rest.rstrip("\n") if self._begun else rest.strip("\n"), calls=calls)
        return ReplyPart(content=self._content_around_calls(message) if calls else self._pending, calls=calls)

    def _start(self) -> None:
        body = self._pending.lstrip()
        if body.startswith(_THINK):
            self._pending = body.removeprefix(_THINK)
            self._state = "reasoning"
        elif not _THINK.startswith(body):
            self._state = "reasoning" if self._starts_reasoning else "content"

    def _take_reasoning(self) -> str:
        self._skip_line_breaks()
        end = self._pending.find(_END_THINK)
        if end >= 0:
            reasoning = self._pending[:end].rstrip("\n")
            self._pending = self._pending[end + len(_END_THINK) :]
            self._state, self._begun, self._after_reasoning = "content", False, True
            return reasoning
        markers = (_END_THINK, self._calls.open) if self._calls and self._calls.open else (_END_THINK,)
        end = _certain_length(self._pending, markers)
        return self._release(len(self._pending[:end].rstrip("\n")))

    def _take_content(self) -> str:
        if self._after_reasoning:
            self._skip_line_breaks()
        if self._calls is None:
            return self._release(len(self._pending))
        if not self._calls.open:
            return self._content_or_call(self._calls)
        if self._calls.open in self._pending:
            self._state = "held"
        end = _certain_length(self._pending, (self._calls.open,))
        return self._release(len(self._pending[:end].rstrip()))

    def _content_or_call(self, calls: CallFormat) -> str:
        """Return the pending text as content, unless it may be a call.

        Without markers, a reply that is only a call is one. Any other reply is content.
        """
        if calls.may_start(self._pending.lstrip()):
            return ""
        self._calls = None
        return self._release(len(self._pending))

    def _skip_line_breaks(self) -> None:
        if not self._begun:
            self._pending = self._pending.lstrip("\n")
            self._begun = bool(self._pending)

    def _release(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        return text

    def _content_around_calls(self, message: dict[str, Any]) -> str:
        """Return the content between and after the calls that earlier calls of `feed` did not return."""
        released = self._released.lstrip()
        content: str = message["content"]
        return content[len(released) :] if content.startswith(released) else ""


def _certain_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of `text` before the first marker, or before an end that may become a marker."""
    positions = [position for marker in markers if (position := text.find(marker)) >= 0]
    return min(positions, default=len(text) - partial_length(text, markers))
