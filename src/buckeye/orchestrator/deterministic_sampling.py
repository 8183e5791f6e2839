"""Lockstep sampling for the synchronous mode: the engines always see the same batches.

Floating-point sums depend on what else is in a batch, and what is in a batch depends on arrival times. So in
synchronous mode no request is sent until every rollout that is playing has asked for its next turn; then all
of them go as one wave, in a fixed order. The result is reproducible to the bit, whatever the timing. (A
rollout that asks for several turns at once takes part with those that it has asked for when all the others
have asked: it is as reproducible as its environment is punctual.)

A wave has one `max_tokens` for all. Where rollouts have different room left (prompts differ in length), those
with about the same room share a wave of the least of it, and the replies that this cut off go on in another.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.inference.client import Generation, InferenceClient, SamplingParams
from buckeye.orchestrator.policy import derive_seed


class WaveClient(Protocol):
    """The part of the inference client that a lockstep uses."""

    async def generate_wave(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[Generation]: ...


@dataclass(slots=True)
class _Request:
    seat: LockstepSeat
    prompt_ids: Sequence[int]
    params: SamplingParams
    answer: asyncio.Future[Generation]
    begun: Generation | None = None

    def whole(self, end: Generation) -> Generation:
        """What was sampled before, and then `end`."""
        if self.begun is None:
            return end
        return Generation(
            token_ids=[*self.begun.token_ids, *end.token_ids],
            logprobs=[*self.begun.logprobs, *end.logprobs],
            versions=[*self.begun.versions, *end.versions],
            finish_reason=end.finish_reason,
        )

    def after(self, cut_off: Generation) -> _Request:
        """The request for what comes after a reply that a wave's limit cut off."""
        done = len(cut_off.token_ids)
        params = replace(
            self.params,
            max_tokens=self.params.max_tokens - done,
            min_tokens=max(0, self.params.min_tokens - done),
        )
        prompt_ids = [*self.prompt_ids, *cut_off.token_ids]
        return _Request(self.seat, prompt_ids, params, self.answer, self.whole(cut_off))


class Lockstep:
    """Gathers the requests of the rollouts that joined and sends them as waves."""

    def __init__(self, client: WaveClient) -> None:
        self._client = client
        self._seed = 0
        self._live = 0
        self._wave = 0
        self._requests: list[_Request] = []
        self._sending: set[asyncio.Task[None]] = set()

    def begin(self, seed: int) -> None:
        """Count waves anew under `seed`: the waves of a step do not depend on the steps before it."""
        assert not self._live
        self._seed = seed
        self._wave = 0

    def seat(self, *order: int) -> LockstepSeat:
        """Take part as one rollout; `order` fixes its place in every wave. Leave by `LockstepSeat.leave`."""
        self._live += 1
        return LockstepSeat(self, order)

    def _leave(self) -> None:
        self._live -= 1
        self._send_if_complete()

    async def _generate(
        self, seat: LockstepSeat, prompt_ids: Sequence[int], params: SamplingParams
    ) -> Generation:
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._requests.append(_Request(seat, prompt_ids, params, answer))
        # not at once: the other replies that the same call asks for are about to come
        asyncio.get_running_loop().call_soon(self._send_if_complete)
        try:
            return await answer
        except asyncio.CancelledError:  # a rollout that has run out of time: it may ask anew, or leave
            self._requests = [request for request in self._requests if request.answer is not answer]
            raise

    def _send_if_complete(self) -> None:
        if self._requests and len({id(request.seat) for request in self._requests}) == self._live:
            requests, self._requests = self._requests, []
            requests.sort(key=lambda request: (request.seat.order, list(request.prompt_ids)))
            task = asyncio.create_task(self._send(requests))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, requests: list[_Request]) -> None:
        together: dict[SamplingParams, list[_Request]] = defaultdict(list)
        for request in requests:
            rounded = _round_down(request.params.max_tokens)
            together[replace(request.params, max_tokens=rounded, seed=0)].append(request)
        waiting = deque(together.values())
        part = 0
        while waiting:
            seed = derive_seed(self._seed, self._wave, part)  # the wave's sequence i draws from seed + i
            waiting.extend(await self._send_part(waiting.popleft(), seed))
            part += 1
        self._wave += 1

    async def _send_part(self, members: list[_Request], seed: int) -> list[list[_Request]]:
        """Sample as much for all as the one with the least room may; what is to go on, by room left."""
        params = min((m.params for m in members), key=lambda params: params.max_tokens)
        try:
            generations = await self._client.generate_wave(
                [m.prompt_ids for m in members], replace(params, seed=seed)
            )
        except Exception as error:
            for member in members:
                if not member.answer.done():
                    member.answer.set_exception(error)
            return []
        unfinished: dict[int, list[_Request]] = defaultdict(list)
        for member, generation in zip(members, generations, strict=True):
            left = member.params.max_tokens - params.max_tokens
            if (
                left
                and len(generation.token_ids) == params.max_tokens
                and generation.finish_reason == "length"
            ):
                unfinished[left].append(member.after(generation))
            elif not member.answer.done():
                member.answer.set_result(member.whole(generation))
        return list(unfinished.values())


def lockstep_of(config: OrchestratorConfig, client: InferenceClient) -> Lockstep | None:
    """What a run samples with if it is to be repeated to the bit; where nobody says, if it is synchronous and
    the servers, which are ready, can compute the same again."""
    wanted = config.deterministic
    if wanted is None:
        wanted = not config.max_async_level and not any(replica.is_vllm for replica in client.replicas)
    return Lockstep(client) if wanted else None


class LockstepSeat:
    """One rollout's seat in a lockstep; satisfies `Sampler`."""

    def __init__(self, lockstep: Lockstep, order: tuple[int, ...]) -> None:
        self._lockstep = lockstep
        self.order = order
        """Its place in every wave."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Wait for the wave to be complete, and for this rollout's part of its answer."""
        return await self._lockstep._generate(self, prompt_ids, params)

    def leave(self) -> None:
        """The rollout is over; waves no longer wait for it."""
        self._lockstep._leave()


def _round_down(count: int) -> int:
    """A number to its first three binary digits: at most a fifth less."""
    digits = max(0, count.bit_length() - 3)
    return count >> digits << digits
