"""Deterministic sampling for the synchronous mode: every run sends the same batches to the engines.

The log-probs of a request depend on the other requests in its batch, because floating-point sums do. Without
this module, the batches would depend on the times when requests arrive. This module holds all requests until
every running rollout has sent one. Then it sends them as one batch, in a fixed order. The result is
reproducible to the bit.

If a rollout sends several requests at once, the batch includes the requests that have arrived when every
other rollout has sent one. The result then depends on the timing of this rollout's environment.

All requests of a batch have the same `max_tokens`. Rollouts have different numbers of tokens left, because
prompts differ in length. So rollouts with similar numbers share a batch, and the smallest number is the
limit. Replies that reach this limit too early continue in another batch.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from dataclasses import dataclass, replace

import numpy as np

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.inference.client import Generation, InferenceClient, SamplingParams
from buckeye.inference.types import TokenIds
from buckeye.orchestrator.policy import derive_seed


@dataclass(slots=True)
class _Request:
    participant: Participant
    prompt_ids: TokenIds
    params: SamplingParams
    reply: asyncio.Future[Generation]
    asked: float
    queued: float | None = None
    partial: Generation | None = None

    def join_parts(self, end: Generation) -> Generation:
        """Return the whole reply: the parts of earlier batches, then `end`."""
        if self.partial is None:
            return replace(end, queued_seconds=self.queued or 0.0)
        return replace(
            self.partial,
            token_ids=[*self.partial.token_ids, *end.token_ids],
            logprobs=[*self.partial.logprobs, *end.logprobs],
            versions=[*self.partial.versions, *end.versions],
            finish_reason=end.finish_reason,
        )

    def continuation(self, cut_off: Generation) -> _Request:
        """Return the request for the rest of a reply that reached the limit of its batch."""
        done = len(cut_off.token_ids)
        params = replace(
            self.params,
            max_tokens=self.params.max_tokens - done,
            min_tokens=max(0, self.params.min_tokens - done),
        )
        prompt_ids = np.array([*self.prompt_ids, *cut_off.token_ids], np.int32)
        return replace(self, prompt_ids=prompt_ids, params=params, partial=self.join_parts(cut_off))


class DeterministicSampling:
    """Collector of requests. It sends them as a batch when every participant has sent one."""

    def __init__(self, client: InferenceClient) -> None:
        self._client = client
        self._seed = 0
        self._live = 0
        self._batch = 0
        self._requests: list[_Request] = []
        self._sending: set[asyncio.Task[None]] = set()

    def begin(self, seed: int) -> None:
        """Set the seed and reset the batch counter, so that a step does not depend on earlier steps."""
        assert not self._live
        self._seed = seed
        self._batch = 0

    def join(self, *order: int) -> Participant:
        """Add a rollout as a participant. `order` is the sort key of its position in every batch."""
        self._live += 1
        return Participant(self, order)

    def _leave(self) -> None:
        self._live -= 1
        self._send_if_complete()

    async def _generate(
        self, participant: Participant, prompt_ids: TokenIds, params: SamplingParams
    ) -> Generation:
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Generation] = loop.create_future()
        self._requests.append(_Request(participant, prompt_ids, params, reply, asked=loop.time()))
        # do not send at once: this rollout may send more requests in this iteration of the event loop
        loop.call_soon(self._send_if_complete)
        try:
            return await reply
        except asyncio.CancelledError:  # the rollout timed out: it may send another request, or leave
            self._requests = [request for request in self._requests if request.reply is not reply]
            raise

    def _send_if_complete(self) -> None:
        if self._requests and len({id(request.participant) for request in self._requests}) == self._live:
            requests, self._requests = self._requests, []
            requests.sort(key=lambda request: (request.participant.order, list(request.prompt_ids)))
            task = asyncio.create_task(self._send(requests))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, requests: list[_Request]) -> None:
        batches: dict[SamplingParams, list[_Request]] = defaultdict(list)
        for request in requests:
            rounded = _round_down(request.params.max_tokens)
            batches[replace(request.params, max_tokens=rounded, seed=0)].append(request)
        waiting = deque(batches.values())
        part = 0
        while waiting:
            seed = derive_seed(self._seed, self._batch, part)  # sequence i of the batch uses seed + i
            waiting.extend(await self._send_part(waiting.popleft(), seed))
            part += 1
        self._batch += 1

    async def _send_part(self, members: list[_Request], seed: int) -> list[list[_Request]]:
        """Sample replies up to the smallest `max_tokens` of the requests.

        Return requests for the rest of unfinished replies, grouped by the number of tokens left.
        """
        params = min((m.params for m in members), key=lambda params: params.max_tokens)
        now = asyncio.get_running_loop().time()
        for member in members:
            if member.queued is None:
                member.queued = now - member.asked
        try:
            generations = await self._client.generate_batch(
                [m.prompt_ids for m in members], replace(params, seed=seed)
            )
        except Exception as error:
            for member in members:
                if not member.reply.done():
                    member.reply.set_exception(error)
            return []
        unfinished: dict[int, list[_Request]] = defaultdict(list)
        for member, generation in zip(members, generations, strict=True):
            left = member.params.max_tokens - params.max_tokens
            if (
                left
                and len(generation.token_ids) == params.max_tokens
                and generation.finish_reason == "length"
            ):
                unfinished[left].append(member.continuation(generation))
            elif not member.reply.done():
                member.reply.set_result(member.join_parts(generation))
        return list(unfinished.values())


def deterministic_sampling(
    config: OrchestratorConfig, client: InferenceClient
) -> DeterministicSampling | None:
    """Return an object for deterministic sampling, or None if the run does not use it.

    If the setting `deterministic` is unset, synchronous runs use deterministic sampling, unless a server is
    vLLM. Call this function when the servers are ready.
    """
    wanted = config.deterministic
    if wanted is None:
        wanted = not config.max_async_level and not any(replica.is_vllm for replica in client.replicas)
    return DeterministicSampling(client) if wanted else None


class Participant:
    """Sampler of one rollout in deterministic sampling. It implements `Sampler`."""

    def __init__(self, sampling: DeterministicSampling, order: tuple[int, ...]) -> None:
        self._sampling = sampling
        self.order = order
        """Sort key of the position in every batch."""

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams) -> Generation:
        """Return this rollout's reply after its batch has been sampled."""
        return await self._sampling._generate(self, prompt_ids, params)

    def leave(self) -> None:
        """End the participation. Batches no longer wait for this rollout."""
        self._sampling._leave()


def _round_down(count: int) -> int:
    """Round a number down to three leading binary digits, which subtracts less than 20%."""
    digits = max(0, count.bit_length() - 3)
    return count >> digits << digits
