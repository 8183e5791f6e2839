"""The policy an environment talks to: it samples through the engines and records every token."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from buckeye.envs.base import FinishReason, Message, Reply, Tool
from buckeye.errors import InferenceError
from buckeye.inference.client import Generation, SamplingParams
from buckeye.inference.render import ChatRenderer, Conversation


class Sampler(Protocol):
    """Something that samples token ids: the client itself, or the lockstep that makes waves of it."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation: ...


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


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on all parts and on nothing else."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class RecordingPolicy:
    """`Policy` for one rollout. Each turn extends the earlier token ids verbatim; where the chat template, or
    the environment, rewrites earlier turns instead, a new segment is opened."""

    def __init__(
        self,
        *,
        sampler: Sampler,
        renderer: ChatRenderer,
        params: SamplingParams,
        seq_len: int,
        seed: int,
    ) -> None:
        self._sampler = sampler
        self._renderer = renderer
        self._params = params
        self._seq_len = seq_len
        self._seed = seed
        self._conversation: Conversation | None = None
        self._last: Generation | None = None
        self._sampling = False
        self.segments: list[Segment] = []
        self.turns = 0
        self.sampling_seconds = 0.0
        """How long it has waited for the engines."""
        self.turns_without_room = 0
        """Turns that got an empty reply because seq_len was full; not among `turns`."""
        self.extended = 0
        """Turns after the first that continue the tokens before them."""
        self.finish_reason: FinishReason = "stop"

    @property
    def branched(self) -> int:
        """Turns after the first that had to begin a new segment."""
        return max(0, len(self.segments) - 1)

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Sample the next assistant message.

        A conversation that has filled `seq_len` gets an empty reply with finish reason "length". Raises
        InferenceError if no engine answers, if one gives the reply up, or if the very first prompt does not
        fit.
        """
        if self._sampling:
            raise InferenceError("chat() was called again before the turn before it had ended")
        extended = self._extended(messages, tools)
        conversation = extended or self._renderer.render(messages, tools)
        room = self._seq_len - len(conversation.ids)
        if room <= 0:
            return self._out_of_room(len(conversation.ids))
        most = min(self._params.max_tokens, room)
        params = replace(
            self._params,
            max_tokens=most,
            min_tokens=min(self._params.min_tokens, most),
            seed=derive_seed(self._seed, self.turns),
            stop_token_ids=self._renderer.stop_token_ids,
        )
        self._sampling = True
        asked = time.monotonic()
        try:
            generation = await self._sampler.generate(conversation.ids, params)
        finally:
            self._sampling = False
            self.sampling_seconds += time.monotonic() - asked
        if generation.finish_reason == "abort":
            raise InferenceError("the engine aborted the reply")
        if extended is None:  # recorded only now: a turn that failed leaves no trace
            self.segments.append(Segment())
        else:
            self.extended += 1
        self.segments[-1].add_context(conversation.ids[len(self.segments[-1].token_ids) :])
        self.segments[-1].add_sampled(generation, self.turns)
        self._conversation, self._last = conversation, generation
        self.turns += 1
        return self._reply(conversation, generation)

    def _extended(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation | None:
        """The conversation so far, sampled ids verbatim, and what came after it; None if it has to start
        anew."""
        if self._conversation is None or self._last is None:
            return None
        return self._renderer.extend(self._conversation, self._last.token_ids, messages, tools)

    def _out_of_room(self, prompt_tokens: int) -> Reply:
        if self.turns == 0:
            raise InferenceError(
                f"the prompt has {prompt_tokens} tokens and seq_len is {self._seq_len}: "
                "raise orchestrator.seq_len"
            )
        self.finish_reason = "length"
        self.turns_without_room += 1
        return Reply(text="", finish_reason="length", message={"role": "assistant", "content": ""})

    def _reply(self, conversation: Conversation, generation: Generation) -> Reply:
        self.finish_reason = "length" if generation.finish_reason == "length" else "stop"
        ids = generation.token_ids
        if ids and ids[-1] in self._renderer.stop_token_ids:
            ids = ids[:-1]
        return Reply(
            text=self._renderer.decode(ids),
            finish_reason=self.finish_reason,
            message=self._renderer.parse(conversation, generation.token_ids),
        )
