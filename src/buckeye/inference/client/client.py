"""`InferenceClient`: several servers as one. It samples on those that are up, keeps all of them at the same
weights, notices those that are lost, asks others instead, and takes them back when they are right again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx

from buckeye.errors import InferenceError
from buckeye.inference.client.fleet import Fleet
from buckeye.inference.client.replica import Replica, ReplicaLostError, gather
from buckeye.inference.client.router import Router
from buckeye.inference.client.weights import Target
from buckeye.inference.types import Generation, SamplingParams, version_of
from buckeye.transport.weights import Canary

_RECOVERY_SECONDS = 60.0
_HEARTBEAT_SECONDS = 60.0  # a long prompt on a slow CPU keeps an engine busy for a while
_MOST_LOSSES = 8
_ABORT_AGAIN_SECONDS = 0.02

T = TypeVar("T")


class Session:
    """The turns of one conversation: they go to the server that has computed the turns before, as long as it
    is up and has room."""

    def __init__(self, client: InferenceClient) -> None:
        self._client = client
        self._open: dict[str, Replica] = {}
        self._aborted = False
        self.replica: Replica | None = None

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Sample the next turn."""
        return await self._client.generate(prompt_ids, params, session=self)

    async def abort(self) -> None:
        """End what is being sampled: it comes back as it is, with finish reason "abort". A server that cannot
        do that, because somebody else has started it, finishes it."""
        self._aborted = True
        pause = _ABORT_AGAIN_SECONDS
        while self._open:
            for request_id, replica in list(self._open.items()):
                with contextlib.suppress(InferenceError):
                    await replica.abort(request_id)
            await asyncio.sleep(pause)  # what was asked last may have come before the request
            pause *= 2

    async def _ask(self, replica: Replica, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        if self._aborted:
            return Generation(token_ids=[], logprobs=[], versions=[], finish_reason="abort")
        request_id = uuid.uuid4().hex
        self._open[request_id] = replica
        try:
            generation = await replica.generate(prompt_ids, params, request_id=request_id)
        finally:
            del self._open[request_id]
        self.replica = replica
        return generation


class InferenceClient:
    """An async context manager. `timeout` is the deadline of every call, in seconds; `model` the name that
    the servers must serve. All methods raise `InferenceError`, which names the server, what was asked and how
    long it was waited for.

    From `wait_ready` on the servers are watched: one that dies, is started anew, or is silent for
    `heartbeat_timeout` seconds is used no more until it answers again and has the newest weights; its
    requests are asked of others. `recovery_timeout` is how long all of them may be out at the same time.
    `on_broken(url, reason)` is told of a server that runs and should be started anew.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        api_key: str | None,
        timeout: float,
        model: str,
        recovery_timeout: float = _RECOVERY_SECONDS,
        heartbeat_timeout: float = _HEARTBEAT_SECONDS,
        on_broken: Callable[[str, str], None] | None = None,
    ) -> None:
        if not base_urls:
            raise InferenceError("No inference server is configured: client.base_url is empty.")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        certificates = httpx.create_ssl_context()

        def connect() -> httpx.AsyncClient:
            return httpx.AsyncClient(headers=headers, timeout=None, trust_env=False, verify=certificates)  # noqa: S113  the caller sets one for each request

        self._replicas = [
            Replica(index, url, model=model, timeout=timeout, connect=connect)
            for index, url in enumerate(base_urls)
        ]
        self._router = Router(self._replicas, timeout=timeout)
        self._fleet = Fleet(
            self._replicas,
            self._router,
            recovery_timeout=recovery_timeout,
            heartbeat_timeout=heartbeat_timeout,
            on_broken=on_broken,
        )
        self._requeued = 0

    async def __aenter__(self) -> InferenceClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._fleet.close()
        for replica in self._replicas:
            await replica.close()

    async def wait_ready(self, timeout: float) -> None:
        """Wait until every server is healthy, at most `timeout` seconds, check that it serves the model, and
        watch it from then on."""
        await self._fleet.start(timeout)

    def check(self) -> None:
        """Raise InferenceError if the servers are beyond recovery: all out for too long, or all of them
        computing something else than the trainer."""
        self._fleet.check()

    @property
    def replicas(self) -> Sequence[Replica]:
        """Every server, with counts of its work."""
        return self._replicas

    @property
    def sampled_tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(replica.tokens for replica in self._replicas)

    async def wait_for_place(self) -> None:
        """Wait until a server has a place for one more rollout: it computes fewer requests than it can at a
        time, or a few more than that, so that it never has nothing to go on with."""
        await self._router.wait_for_place()

    def session(self) -> Session:
        """For the turns of one conversation."""
        return Session(self)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: Session | None = None
    ) -> Generation:
        """Sample one sequence: on the server of the session, else on the one with the fewest tokens in
        flight. If the server is lost, another one samples the same request."""

        async def ask(replica: Replica) -> Generation:
            if session is None:
                return await replica.generate(prompt_ids, params)
            return await session._ask(replica, prompt_ids, params)

        cost = len(prompt_ids) + params.max_tokens
        return await self._placed(ask, cost, prefer=session.replica if session is not None else None)

    async def generate_batch(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[Generation]:
        """Sample one sequence for each prompt, all sent at once; sequence i uses the seed `params.seed` + i.

        Server r gets the r-th contiguous part, so the same batch always reaches the same engines in the same
        order. The part of a server that is out goes as a whole to another one that has nothing else to do:
        what is sampled is the same.
        """
        bounds = [len(prompts) * r // len(self._replicas) for r in range(len(self._replicas) + 1)]
        parts = zip(self._replicas, bounds, bounds[1:], strict=False)
        asked = [
            self._generate_part(home, prompts[start:end], params, start)
            for home, start, end in parts
            if end > start
        ]
        return [generation for part in await gather(asked) for generation in part]

    async def update_weights(
        self,
        path: Path,
        version: int,
        checksum: str,
        *,
        canary: Canary | None = None,
        adapter: bool = False,
    ) -> None:
        """Bring all servers that are up, concurrently, to the weights in `path`, or to the `adapter` in it on
        the model that they were started with; running requests go on under them. Those that are out get them
        before they are used again. Each must echo version and checksum, and compute what the `canary` says:
        at once if it is idle, in its turn if it is busy.

        A server that fails is taken out. Raises InferenceError if all do, or none is up in time.
        """
        target = Target(path=path, version=version, checksum=checksum, canary=canary, adapter=adapter)
        await self._fleet.update(target)

    async def weight_versions(self) -> list[int]:
        """The policy version of every server."""

        async def version(replica: Replica) -> int:
            info: Any = await replica.call("GET", "/weight_info")
            return replica.parsed("/weight_info", lambda: version_of(info["weight_version"]))

        return await gather([version(replica) for replica in self._replicas])

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and the present state, of every server: `inference/<i>/<name>`."""
        return {
            **self._fleet.metrics(),
            "inference/requeued": self._requeued,
            "inference/waiting": self._router.waiting_for_place,
        }

    async def _generate_part(
        self, home: Replica, prompts: Sequence[Sequence[int]], params: SamplingParams, start: int
    ) -> list[Generation]:
        seeded = dataclasses.replace(params, seed=params.seed + start)
        return await self._placed(
            lambda replica: replica.generate_part(prompts, seeded),
            sum(map(len, prompts)) + len(prompts) * params.max_tokens,
            prefer=home,
            alone=True,
        )

    async def _placed(
        self,
        ask: Callable[[Replica], Awaitable[T]],
        cost: int,
        *,
        prefer: Replica | None,
        alone: bool = False,
    ) -> T:
        """What `ask` brings from one server, from another one if that is lost."""
        for _ in range(_MOST_LOSSES):
            replica = await self._router.acquire(cost, prefer=prefer, alone=alone)
            epoch = replica.epoch
            try:
                with replica.busy:
                    return await ask(replica)
            except ReplicaLostError as error:
                if not replica.watched:
                    raise
                await self._fleet.lost(replica, epoch, error)
                self._requeued += 1
                last = error
            finally:
                self._router.release(replica, cost)
        raise InferenceError(
            f"{_MOST_LOSSES} servers in a row were lost while they had the same request: {last}"
        )
