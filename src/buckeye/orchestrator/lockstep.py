"""Lockstep sampling for the synchronous mode: the engines always see the same batches.

Floating-point sums depend on what else is in a batch, and what is in a batch depends on arrival times. So in
synchronous mode no request is sent until every rollout that is playing has asked for its next turn; then all
of them go as one wave, in a fixed order. The result is reproducible to the bit, whatever the timing.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from buckeye.inference.client import Generation, SamplingParams
from buckeye.orchestrator.policy import derive_seed


class WaveClient(Protocol):
    """The part of the inference client that a lockstep uses."""

    async def generate_wave(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[Generation]: ...


@dataclass(slots=True)
class _Request:
    order: tuple[int, ...]
    prompt_ids: Sequence[int]
    params: SamplingParams
    answer: asyncio.Future[Generation]


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
        self, order: tuple[int, ...], prompt_ids: Sequence[int], params: SamplingParams
    ) -> Generation:
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._requests.append(_Request(order, prompt_ids, params, answer))
        self._send_if_complete()
        return await answer

    def _send_if_complete(self) -> None:
        if self._requests and len(self._requests) == self._live:
            requests, self._requests = self._requests, []
            task = asyncio.create_task(self._send(sorted(requests, key=lambda r: r.order)))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, requests: list[_Request]) -> None:
        by_params: dict[SamplingParams, list[_Request]] = defaultdict(list)
        for request in requests:  # one seed for the wave: its sequence i draws from seed + i
            by_params[replace(request.params, seed=0)].append(request)
        for part, (params, members) in enumerate(by_params.items()):
            seeded = replace(params, seed=derive_seed(self._seed, self._wave, part))
            await self._send_part(seeded, members)
        self._wave += 1

    async def _send_part(self, params: SamplingParams, members: list[_Request]) -> None:
        try:
            generations = await self._client.generate_wave([m.prompt_ids for m in members], params)
        except Exception as error:
            for member in members:
                if not member.answer.done():
                    member.answer.set_exception(error)
            return
        for member, generation in zip(members, generations, strict=True):
            if not member.answer.done():
                member.answer.set_result(generation)


class LockstepSeat:
    """One rollout's seat in a lockstep; satisfies `Sampler`."""

    def __init__(self, lockstep: Lockstep, order: tuple[int, ...]) -> None:
        self._lockstep = lockstep
        self._order = order

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Wait for the wave to be complete, and for this rollout's part of its answer."""
        return await self._lockstep._generate(self._order, prompt_ids, params)

    def leave(self) -> None:
        """The rollout is over; waves no longer wait for it."""
        self._lockstep._leave()
