"""The training samples of one rollout: which call goes on with which, and every token exactly once in a loss.

A rollout is a tree of turns. A call whose prompt goes on after an earlier turn, token for token, is appended
to that turn's segment where the segment still ends there; otherwise it begins a segment of its own, which
repeats the shared tokens as context. So a sampled token has `loss_mask` True in one segment only: the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from buckeye.envs.base import Message, Tool
from buckeye.errors import UsageError
from buckeye.inference.client import Generation
from buckeye.inference.render import ChatRenderer, Conversation


@dataclass(slots=True)
class Segment:
    """One training sample in the making: aligned lists, one entry a token. `turns` counts the rollout's turns
    from 0. `versions` and `turns` are -1 and `logprobs` is 0.0 where `loss_mask` is False (prompt and
    environment tokens)."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def add_context(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample."""
        self.token_ids += ids
        self.loss_mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)
        self.turns += [-1] * len(ids)

    def add_sampled(self, generation: Generation, turn: int) -> None:
        """Append sampled tokens verbatim, with the log-probs and versions they were sampled under."""
        self.token_ids += generation.token_ids
        self.loss_mask += [True] * len(generation.token_ids)
        self.logprobs += generation.logprobs
        self.versions += generation.versions
        self.turns += [turn] * len(generation.token_ids)


@dataclass(slots=True, eq=False)
class _Thread:
    """A segment while it may grow. `text` is that of its last prompt (of a completed text: with the reply);
    the text of every earlier turn is a prefix of it. `growing`: a call that goes on at its end is open."""

    segment: Segment = field(default_factory=Segment)
    text: str = ""
    growing: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What a call asks the engine. `thread` is the one that it goes on with, None where it begins one;
    `conversation` is what a chat was rendered to, `text` what a completion goes on after."""

    ids: list[int]
    conversation: Conversation | None = None
    text: str | None = None
    thread: _Thread | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """A sampled reply, and where it lies: tokens `start` to `end` of the thread; `text_end` characters of its
    text are the prompt (of a completion: with the reply). `messages` is None for what was no chat."""

    thread: _Thread
    start: int
    end: int
    text_end: int = 0
    messages: tuple[Message, ...] | None = None
    tools: tuple[Tool, ...] = ()

    @property
    def ids(self) -> list[int]:
        """The tokens up to the end of the reply."""
        return self.thread.segment.token_ids[: self.end]

    @property
    def text(self) -> str:
        """The text of the prompt; of a completion, with the reply; "" where only token ids are known."""
        return self.thread.text[: self.text_end]

    @property
    def is_last(self) -> bool:
        """Whether its thread ends with it, and nobody is about to go on there."""
        return self.end == len(self.thread.segment.token_ids) and not self.thread.growing


class Samples:
    """The segments of one rollout, in the order in which they were begun. Calls may be open together."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._turns: list[_Turn] = []
        self.segments: list[Segment] = []
        self.extended = 0
        """Turns that continue the segment before them."""

    def chat_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Prompt:
        """The prompt for the next assistant message: after the longest chat that it goes on with, else new.
        Raises `UsageError` if the chat template refuses the messages."""
        chats = [turn for turn in self._turns if _may_go_on(turn, messages)]
        # the longest first; among equals one that has not been continued, then the newest
        chats.sort(key=lambda turn: (len(turn.messages or ()), turn.is_last, turn.end), reverse=True)
        for number, turn in enumerate(chats):
            if number == 1:  # a history that is rewritten: most earlier turns can be told by their text alone
                text = self._renderer.prompt_text(messages, tools)
            if number and not text.startswith(turn.text):
                continue
            extended = self._extended(turn, messages, tools)
            if extended is not None:
                return Prompt(ids=extended.ids, conversation=extended, thread=_thread_of(turn))
        conversation = self._renderer.render(messages, tools)
        return Prompt(ids=conversation.ids, conversation=conversation)

    def text_prompt(self, text: str) -> Prompt:
        """The prompt that goes on with a text."""
        known = [
            turn for turn in self._turns if turn.messages is None and turn.text and text.startswith(turn.text)
        ]
        turn = max(known, key=lambda turn: (turn.text_end, turn.is_last), default=None)
        if turn is None:
            return Prompt(ids=self._renderer.encode_prompt(text), text=text)
        ids = [*turn.ids, *self._renderer.encode(text[turn.text_end :])]
        return Prompt(ids=ids, text=text, thread=_thread_of(turn))

    def ids_prompt(self, ids: Sequence[int]) -> Prompt:
        """The prompt of token ids. Raises `UsageError` for ids that the tokenizer does not have."""
        if ids and not 0 <= min(ids) <= max(ids) < self._renderer.vocab_size:
            raise UsageError(f"There is a token id outside the vocabulary of {self._renderer.vocab_size}.")
        if not ids:
            raise UsageError("The prompt has no tokens.")
        known = [turn for turn in self._turns if turn.end <= len(ids) and turn.ids == list(ids[: turn.end])]
        turn = max(known, key=lambda turn: (turn.end, turn.is_last), default=None)
        return Prompt(ids=list(ids), thread=None if turn is None else _thread_of(turn))

    @contextlib.contextmanager
    def open(self, prompt: Prompt) -> Iterator[None]:
        """While the reply to `prompt` is sampled: calls that go on at the same place begin segments."""
        if prompt.thread is None:
            yield
            return
        prompt.thread.growing = True
        try:
            yield
        finally:
            prompt.thread.growing = False

    def record(
        self, prompt: Prompt, generation: Generation, turn: int, *, opening: Sequence[int] = ()
    ) -> None:
        """Keep what was sampled after `prompt` and the `opening` that was written for the model. A call that
        failed is never recorded and leaves no trace."""
        thread = prompt.thread
        if thread is None:
            thread = _Thread()
            self.segments.append(thread.segment)
        else:
            self.extended += 1
        start = len(prompt.ids)
        thread.segment.add_context([*prompt.ids, *opening][len(thread.segment.token_ids) :])
        thread.segment.add_sampled(generation, turn)
        end = len(thread.segment.token_ids)
        if prompt.conversation is not None:
            thread.text = prompt.conversation.text
            chat = prompt.conversation
            made = _Turn(
                thread=thread,
                start=start,
                end=end,
                text_end=len(chat.text),
                messages=tuple(chat.messages),
                tools=tuple(chat.tools),
            )
        elif prompt.text is not None:
            thread.text = prompt.text + self._renderer.decode(generation.token_ids)
            made = _Turn(thread=thread, start=start, end=end, text_end=len(thread.text))
        else:
            made = _Turn(thread=thread, start=start, end=end)
        self._turns.append(made)

    def _extended(
        self, turn: _Turn, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> Conversation | None:
        ids = turn.ids
        conversation = Conversation(
            ids=ids[: turn.start],
            text=turn.text,
            messages=turn.messages or (),
            tools=turn.tools,
        )
        return self._renderer.extend(conversation, ids[turn.start :], messages, tools)


def _thread_of(turn: _Turn) -> _Thread | None:
    return turn.thread if turn.is_last else None


def _may_go_on(turn: _Turn, messages: Sequence[Message]) -> bool:
    """Whether it is worth asking the renderer: the messages before the reply are those of the turn, but for
    what assistants said. (That has several spellings; only the chat template can tell.)"""
    if turn.messages is None or len(messages) <= len(turn.messages):
        return False
    if messages[len(turn.messages)]["role"] != "assistant":
        return False
    return all(
        now["role"] == then["role"]
        and (now["role"] == "assistant" or (now.get("content") or "") == (then.get("content") or ""))
        for now, then in zip(messages, turn.messages, strict=False)
    )
