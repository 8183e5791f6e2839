"""Which server gets a request: the least loaded, or the one that knows its prefix. When a rollout begins."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from buckeye.errors import InferenceError
from buckeye.inference.client.replica import Replica

_SECONDS_TO_ASK = 1.0


@dataclass(slots=True, eq=False)
class _Waiting:
    cost: int
    prefer: Replica | None
    alone: bool
    placed: asyncio.Future[Replica] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Router:
    """Places requests on servers that are up, in the order they come, and lets rollouts begin. How many
    requests a server has is up to it; but a rollout begins only when one has a place for it, so that its time
    does not run out while it waits for others. `timeout` is how long, in seconds, a request waits for a
    server that is up."""

    def __init__(self, replicas: Sequence[Replica], *, timeout: float) -> None:
        self._replicas = replicas
        self._timeout = timeout
        self._waiting: deque[_Waiting] = deque()
        self._hopeless: InferenceError | None = None
        self._beginning: deque[asyncio.Future[None]] = deque()
        self._begun: deque[float] = deque()  # until when each of those that have not asked yet has its place

    async def wait_for_place(self) -> None:
        """Wait until a server that is up has a place for one more rollout, in the order they come. A place is
        kept for a second: a rollout that takes longer until it asks something is at work elsewhere. There is
        always one with servers that do not tell how many requests they compute at a time, and when no server
        will come back, which is said to those that ask."""
        begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._beginning.append(begins)
        self._begin()
        try:
            await begins
        except asyncio.CancelledError:
            if begins in self._beginning:
                self._beginning.remove(begins)
            raise

    @property
    def waiting_for_place(self) -> int:
        """Rollouts that wait for a place."""
        return len(self._beginning)

    async def acquire(self, cost: int, *, prefer: Replica | None = None, alone: bool = False) -> Replica:
        """A server for a request of `cost` tokens, which must be released afterwards: `prefer` if it is up
        and has a place, else the one with the fewest tokens. With `alone`, one that has nothing else in
        flight, and `prefer` as long as it is up.

        Raises InferenceError if there is none in time, or no hope that a server comes back.
        """
        self.check()
        waiting = _Waiting(cost, prefer, alone)
        self._waiting.append(waiting)
        self.place()
        try:
            async with asyncio.timeout(self._timeout):
                return await waiting.placed
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.placed.cancelled() and waiting.placed.exception() is None:
                self.release(waiting.placed.result(), cost)  # placed and cancelled at the same time
            if isinstance(error, TimeoutError):
                raise InferenceError(
                    f"No inference server could take a request within {self._timeout:g} s "
                    f"({self.describe()})."
                ) from None
            raise

    def release(self, replica: Replica, cost: int) -> None:
        """The request of `cost` tokens has left a server."""
        replica.tokens_in_flight -= cost
        replica.requests_in_flight -= 1
        self.place()
        self._begin()

    def place(self) -> None:
        """Place as many of those that wait as can be; called whenever that may be more."""
        while self._waiting:
            first = self._waiting[0]
            replica = self._choose(first)
            if replica is None:
                return
            self._waiting.popleft()
            if not first.placed.done():
                replica.tokens_in_flight += first.cost
                replica.requests_in_flight += 1
                if self._begun:
                    self._begun.popleft()
                first.placed.set_result(replica)

    def give_up(self, error: InferenceError) -> None:
        """No server will come back: those that wait, and those that come, get `error`."""
        self._hopeless = error
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.placed.done():
                waiting.placed.set_exception(error)
        self._begin()

    def check(self) -> None:
        """Raise the error of `give_up`."""
        if self._hopeless is not None:
            raise self._hopeless

    def returned(self) -> None:
        """A server is up again."""
        self._hopeless = None
        self.place()
        self._begin()

    def describe(self) -> str:
        """The servers, and what they are at."""
        return "; ".join(
            f"{replica.url}: {f'{replica.tokens_in_flight} tokens in flight' if replica.up else replica.out}"
            for replica in self._replicas
        )

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        while self._beginning and self._has_place():
            begins = self._beginning.popleft()
            if not begins.done():
                self._begun.append(loop.time() + _SECONDS_TO_ASK)
                loop.call_later(_SECONDS_TO_ASK, self._begin)
                begins.set_result(None)

    def _has_place(self) -> bool:
        now = asyncio.get_running_loop().time()
        while self._begun and self._begun[0] <= now:
            self._begun.popleft()
        if self._hopeless is not None:
            return True
        return sum(replica.places for replica in self._replicas if replica.up) > len(self._begun)

    def _choose(self, waiting: _Waiting) -> Replica | None:
        prefer, up = waiting.prefer, [replica for replica in self._replicas if replica.up]
        if prefer in up and (waiting.alone or prefer.places > 0):
            up = [prefer]
        least = min(up, key=lambda replica: replica.tokens_in_flight, default=None)
        return None if least is not None and waiting.alone and least.requests_in_flight else least
