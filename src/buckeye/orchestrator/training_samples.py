"""Training samples of one rollout: its calls, joined to sequences with each sampled token once in the loss.

A rollout is a tree of turns. A call whose prompt continues an earlier turn, token for token, is appended to
that turn's segment if the segment still ends there. Otherwise it begins a separate segment, which repeats the
shared tokens as context. So a sampled token has `loss_mask` True in one segment only: the first.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from buckeye.envs.base import Message, Tool
from buckeye.errors import UsageError
from buckeye.inference.client import Generation
from buckeye.inference.render import ChatRenderer, Conversation

Column = npt.NDArray[np.int32]
_IMMUTABLE = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Span:
    """Run of tokens that one policy version sampled in one turn, or of tokens that were not sampled."""

    length: int
    turn: int = -1
    version: int = -1


@dataclass(slots=True, eq=False)
class Segment:
    """Growing training sample: aligned columns with one entry per token.

    `turns` counts the rollout's turns from 0. Where `loss_mask` is False (prompt and environment tokens),
    `versions` and `turns` are -1 and `logprobs` is 0.0. Memory is 8 bytes per token: these three columns are
    computed from `spans`.
    """

    token_ids: Column = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    spans: list[Span] = field(default_factory=list)

    @property
    def turns(self) -> Column:
        return self._column([span.turn for span in self.spans])

    @property
    def versions(self) -> Column:
        return self._column([span.version for span in self.spans])

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        return self.turns >= 0

    @property
    def sampled(self) -> list[Span]:
        """Spans of the sampled tokens."""
        return [span for span in self.spans if span.turn >= 0]

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(span.length for span in self.sampled)

    def add_context(self, ids: Column) -> None:
        """Append tokens that the policy did not sample."""
        self._append(ids, np.zeros(len(ids), np.float32))
        self.spans.append(Span(len(ids)))

    def add_sampled(self, generation: Generation, turn: int) -> None:
        """Append sampled tokens verbatim, with the log-probs and versions from sampling."""
        self._append(np.array(generation.token_ids, np.int32), np.array(generation.logprobs, np.float32))
        for version, tokens in itertools.groupby(generation.versions):
            self.spans.append(Span(len(list(tokens)), turn, version))

    def _append(self, ids: Column, logprobs: npt.NDArray[np.float32]) -> None:
        self.token_ids = np.concatenate([self.token_ids, ids])
        self.logprobs = np.concatenate([self.logprobs, logprobs])

    def _column(self, values: list[int]) -> Column:
        return np.repeat(np.array(values, np.int32), [span.length for span in self.spans])


@dataclass(slots=True, eq=False)
class _Thread:
    """Segment that may still grow.

    `text` is the text of the last prompt of a chat, or of the last prompt and reply of a completion. It
    begins with the text of every earlier turn. `growing` is True while a call that continues the thread is
    open.
    """

    segment: Segment = field(default_factory=Segment)
    text: str = ""
    growing: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Prompt of one call.

    `thread` is the thread that the prompt continues; None for a new thread. `conversation` is set for a chat,
    and `text` for a text completion.
    """

    ids: Column
    conversation: Conversation | None = None
    text: str | None = None
    thread: _Thread | None = None

    def ids_with(self, reply_start: Sequence[int]) -> Column:
        """Return the token ids, followed by the prefilled start of the reply."""
        return np.concatenate([self.ids, np.array(reply_start, np.int32)]) if reply_start else self.ids


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """Sampled reply at tokens `start` to `end` of its thread.

    The first `text_end` characters of the thread's text are the prompt of a chat, or the prompt and the reply
    of a completion. `messages` is set only for a chat.
    """

    thread: _Thread
    start: int
    end: int
    text_end: int = 0
    messages: tuple[Message, ...] | None = None
    tools: tuple[Tool, ...] = ()
    reply: Message | None = None

    @property
    def ids(self) -> Column:
        """Token ids of the thread up to the end of the reply."""
        return self.thread.segment.token_ids[: self.end]

    @property
    def text(self) -> str:
        """Prompt of a chat, or prompt and reply of a completion; "" if only token ids are known."""
        return self.thread.text[: self.text_end]

    @property
    def is_last(self) -> bool:
        """True if the thread ends with this turn, and no open call continues it."""
        return self.end == len(self.thread.segment.token_ids) and not self.thread.growing


class SampleBuilder:
    """Segments of one rollout, in the order in which they were begun. Calls may be concurrent."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._turns: list[_Turn] = []
        self.segments: list[Segment] = []

    def chat_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Prompt:
        """Return the prompt for the next assistant message. It extends the longest chat that is continued.

        Raise `UsageError` if the chat template rejects the messages.
        """
        chats = [turn for turn in self._turns if _may_extend(turn, messages)]
        # longest first; then a turn that has not been continued, then the newest
        chats.sort(key=lambda turn: (len(turn.messages or ()), turn.is_last, turn.end), reverse=True)
        for number, turn in enumerate(chats):
            if number == 1:  # a rewritten history: the text alone rules out most earlier turns
                text = self._renderer.prompt_text(messages, tools)
            if number and not text.startswith(turn.text):
                continue
            extended = self._extended(turn, messages, tools)
            if extended is not None:
                return _chat_prompt(extended, _thread_of(turn))
        return _chat_prompt(self._renderer.render(messages, tools))

    def text_prompt(self, text: str) -> Prompt:
        """Return the prompt for a text; it extends the longest earlier completion that the text continues."""
        known = [
            turn for turn in self._turns if turn.messages is None and turn.text and text.startswith(turn.text)
        ]
        turn = max(known, key=lambda turn: (turn.text_end, turn.is_last), default=None)
        if turn is None:
            return Prompt(ids=np.array(self._renderer.encode_prompt(text), np.int32), text=text)
        following = np.array(self._renderer.encode(text[turn.text_end :]), np.int32)
        return Prompt(ids=np.concatenate([turn.ids, following]), text=text, thread=_thread_of(turn))

    def ids_prompt(self, ids: Sequence[int]) -> Prompt:
        """Return the prompt for token ids. Raise `UsageError` for empty ids or ids outside the vocabulary."""
        if ids and not 0 <= min(ids) <= max(ids) < self._renderer.vocab_size:
            raise UsageError(
                f"the prompt has a token id outside the vocabulary of {self._renderer.vocab_size} tokens",
                code="BK-INFERENCE-REQUEST",
                hint="use token ids of the model's tokenizer",
            )
        if not ids:
            raise UsageError("the prompt has no tokens", code="BK-INFERENCE-REQUEST")
        column = np.array(ids, np.int32)
        known = [turn for turn in self._turns if np.array_equal(turn.ids, column[: turn.end])]
        turn = max(known, key=lambda turn: (turn.end, turn.is_last), default=None)
        return Prompt(ids=column, thread=None if turn is None else _thread_of(turn))

    @contextlib.contextmanager
    def open(self, prompt: Prompt) -> Iterator[None]:
        """Mark the thread as growing while its reply is sampled; concurrent calls then begin new segments."""
        if prompt.thread is None:
            yield
            return
        prompt.thread.growing = True
        if prompt.conversation is not None:  # it begins with the earlier text, which is needed no more
            prompt.thread.text = prompt.conversation.text
        try:
            yield
        finally:
            prompt.thread.growing = False

    def record(
        self,
        prompt: Prompt,
        generation: Generation,
        turn: int,
        *,
        reply_start: Sequence[int] = (),
        message: Message | None = None,
    ) -> Column:
        """Record a reply: the tokens sampled after `prompt` and the prefilled `reply_start`.

        `message` is the message of these tokens, if it is known. Return the token ids of its segment, up to
        the end of the reply.
        """
        thread = prompt.thread
        if thread is None:
            thread = _Thread()
            self.segments.append(thread.segment)
        start = len(prompt.ids)
        thread.segment.add_context(prompt.ids_with(reply_start)[len(thread.segment.token_ids) :])
        thread.segment.add_sampled(generation, turn)
        end = len(thread.segment.token_ids)
        if prompt.conversation is not None:
            thread.text = prompt.conversation.text
            chat = prompt.conversation
            sampled_turn = _Turn(
                thread=thread,
                start=start,
                end=end,
                text_end=len(chat.text),
                messages=tuple(chat.messages),
                tools=tuple(chat.tools),
                reply=copy_json(message),  # the environment may change the message
            )
        elif prompt.text is not None:
            thread.text = prompt.text + self._renderer.decode(generation.token_ids)
            sampled_turn = _Turn(thread=thread, start=start, end=end, text_end=len(thread.text))
        else:
            sampled_turn = _Turn(thread=thread, start=start, end=end)
        self._turns.append(sampled_turn)
        return thread.segment.token_ids

    def _extended(
        self, turn: _Turn, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> Conversation | None:
        ids = turn.ids.tolist()
        conversation = Conversation(
            ids=ids[: turn.start],
            text=turn.text,
            messages=turn.messages or (),
            tools=turn.tools,
        )
        return self._renderer.extend(conversation, ids[turn.start :], messages, tools, reply=turn.reply)


def copy_json(value: Any) -> Any:
    """Return a deep copy. It takes a tenth of the time of `deepcopy` if the value is plain JSON."""
    if type(value) is dict:
        return {key: copy_json(item) for key, item in value.items()}
    if type(value) is list:
        return [copy_json(item) for item in value]
    return value if type(value) in _IMMUTABLE else copy.deepcopy(value)


def _chat_prompt(conversation: Conversation, thread: _Thread | None = None) -> Prompt:
    """Return the prompt of a chat, with its token ids as a column."""
    ids = np.array(conversation.ids, np.int32)
    chat = Conversation(
        ids=ids, text=conversation.text, messages=conversation.messages, tools=conversation.tools
    )
    return Prompt(ids=ids, conversation=chat, thread=thread)


def _thread_of(turn: _Turn) -> _Thread | None:
    return turn.thread if turn.is_last else None


def _may_extend(turn: _Turn, messages: Sequence[Message]) -> bool:
    """Return True if the renderer should try to extend the turn: the messages before the reply are equal.

    Assistant messages are not compared: they have several equivalent forms that only the template can match.
    """
    if turn.messages is None or len(messages) <= len(turn.messages):
        return False
    if messages[len(turn.messages)]["role"] != "assistant":
        return False
    return all(
        new["role"] == old["role"]
        and (new["role"] == "assistant" or (new.get("content") or "") == (old.get("content") or ""))
        for new, old in zip(messages, turn.messages, strict=False)
    )
