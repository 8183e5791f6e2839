"""Deterministic sampling for the synchronous mode: the engines always receive the same batches.

Floating-point sums depend on the other requests in a batch, and these depend on arrival times. So in
synchronous mode no request is sent until every running rollout has requested its next turn. Then all requests
go out as one batch, in a fixed order. The result is reproducible to the bit, independent of timing.

A rollout may have several concurrent requests. The batch then has the requests that are open when all other
rollouts have one, so the result depends on the timing of that rollout's environment.

All requests of a batch share one `max_tokens`. Prompts differ in length, so rollouts have different numbers
of tokens left. Rollouts with similar numbers share a batch, with the smallest number as the limit. Replies
that this limit cuts off continue in a further batch.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.inference.client import Generation, InferenceClient, SamplingParams
from buckeye.orchestrator.policy import derive_seed


@dataclass(slots=True)
class _Request:
    participant: Participant
    prompt_ids: Sequence[int]
    params: SamplingParams
    reply: asyncio.Future[Generation]
    partial: Generation | None = None

    def join_parts(self, end: Generation) -> Generation:
        """Return the whole reply: earlier parts, then `end`."""
        if self.partial is None:
            return end
        return Generation(
            token_ids=[*self.partial.token_ids, *end.token_ids],
            logprobs=[*self.partial.logprobs, *end.logprobs],
            versions=[*self.partial.versions, *end.versions],
            finish_reason=end.finish_reason,
        )

    def continuation(self, cut_off: Generation) -> _Request:
        """Return the request for the rest of a reply that the batch's limit cut off."""
        done = len(cut_off.token_ids)
        params = replace(
            self.params,
            max_tokens=self.params.max_tokens - done,
            min_tokens=max(0, self.params.min_tokens - done),
        )
        prompt_ids = [*self.prompt_ids, *cut_off.token_ids]
        return _Request(self.participant, prompt_ids, params, self.reply, self.join_parts(cut_off))


class DeterministicSampling:
    """Collector of requests that sends them as a batch when every joined rollout has one."""

    def __init__(self, client: InferenceClient) -> None:
        self._client = client
        self._seed = 0
        self._live = 0
        self._batch = 0
        self._requests: list[_Request] = []
        self._sending: set[asyncio.Task[None]] = set()

    def begin(self, seed: int) -> None:
        """Reset the batch counter under `seed`, so that a step does not depend on earlier steps."""
        assert not self._live
        self._seed = seed
        self._batch = 0

    def join(self, *order: int) -> Participant:
        """Join as one rollout; `order` fixes its position in every batch. `Participant.leave` ends it."""
        self._live += 1
        return Participant(self, order)

    def _leave(self) -> None:
        self._live -= 1
        self._send_if_complete()

    async def _generate(
        self, participant: Participant, prompt_ids: Sequence[int], params: SamplingParams
    ) -> Generation:
        reply: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._requests.append(_Request(participant, prompt_ids, params, reply))
        # later in the event loop: concurrent requests of this rollout may follow
        asyncio.get_running_loop().call_soon(self._send_if_complete)
        try:
            return await reply
        except asyncio.CancelledError:  # the rollout timed out; it may send another request, or leave
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
            seed = derive_seed(self._seed, self._batch, part)  # the batch's sequence i draws from seed + i
            waiting.extend(await self._send_part(waiting.popleft(), seed))
            part += 1
        self._batch += 1

    async def _send_part(self, members: list[_Request], seed: int) -> list[list[_Request]]:
        """Sample up to the smallest limit of the members.

        Return the unfinished requests, grouped by tokens left.
        """
        params = min((m.params for m in members), key=lambda params: params.max_tokens)
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
    """Return the deterministic sampling, or None if the run samples without it.

    With `deterministic` unset, it is used in synchronous mode if no server is vLLM. Call it when the servers
    are ready.
    """
    wanted = config.deterministic
    if wanted is None:
        wanted = not config.max_async_level and not any(replica.is_vllm for replica in client.replicas)
    return DeterministicSampling(client) if wanted else None


class Participant:
    """One rollout in deterministic sampling; implements `Sampler`."""

    def __init__(self, sampling: DeterministicSampling, order: tuple[int, ...]) -> None:
        self._sampling = sampling
        self.order = order
        """Position in every batch."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Return this rollout's reply after its batch has been sampled."""
        return await self._sampling._generate(self, prompt_ids, params)

    def leave(self) -> None:
        """Leave the sampling, so that batches no longer wait for this rollout."""
        self._sampling._leave()


def _round_down(count: int) -> int:
    """Round down to three leading binary digits. This subtracts less than a fifth."""
    digits = max(0, count.bit_length() - 3)
    return count >> digits << digits
