"""Which server gets a request, and when: the least loaded that has room, or the one that knows its prefix."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from buckeye.errors import InferenceError
from buckeye.inference.client.replica import Replica


@dataclass(slots=True, eq=False)
class _Waiting:
    cost: int
    prefer: Replica | None
    alone: bool
    placed: asyncio.Future[Replica] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Router:
    """Places requests on servers that are up, in the order they come. A server has at most
    `max_tokens_in_flight` tokens in flight (prompts, and what may be sampled); a request that is larger gets
    it for itself. `timeout` is how long, in seconds, a request waits for room."""

    def __init__(self, replicas: Sequence[Replica], *, max_tokens_in_flight: int, timeout: float) -> None:
        self._replicas = replicas
        self._bound = max_tokens_in_flight
        self._timeout = timeout
        self._waiting: deque[_Waiting] = deque()
        self._hopeless: InferenceError | None = None

    async def acquire(self, cost: int, *, prefer: Replica | None = None, alone: bool = False) -> Replica:
        """A server for a request of `cost` tokens, which must be released afterwards: `prefer` if it is up
        and has room. With `alone`, one that has nothing else in flight, and `prefer` as long as it is up.

        Raises InferenceError if there is no room in time, or no hope that a server comes back.
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
                    f"No inference server had room for a request of {cost} tokens within "
                    f"{self._timeout:g} s ({self.describe()})."
                ) from None
            raise

    def release(self, replica: Replica, cost: int) -> None:
        """The request of `cost` tokens has left a server."""
        replica.tokens_in_flight -= cost
        self.place()

    def place(self) -> None:
        """Place as many of those that wait as there is room for; called whenever there may be more."""
        while self._waiting:
            first = self._waiting[0]
            replica = self._choose(first)
            if replica is None:
                return
            self._waiting.popleft()
            if not first.placed.done():
                replica.tokens_in_flight += first.cost
                first.placed.set_result(replica)

    def give_up(self, error: InferenceError) -> None:
        """No server will come back: those that wait, and those that come, get `error`."""
        self._hopeless = error
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.placed.done():
                waiting.placed.set_exception(error)

    def check(self) -> None:
        """Raise the error of `give_up`."""
        if self._hopeless is not None:
            raise self._hopeless

    def returned(self) -> None:
        """A server is up again."""
        self._hopeless = None
        self.place()

    def describe(self) -> str:
        """The servers, and what they are at."""
        return "; ".join(
            f"{replica.url}: {f'{replica.tokens_in_flight} tokens in flight' if replica.up else replica.out}"
            for replica in self._replicas
        )

    def _choose(self, waiting: _Waiting) -> Replica | None:
        up = [replica for replica in self._replicas if replica.up]
        if waiting.alone and waiting.prefer in up:
            up = [waiting.prefer]
        elif waiting.prefer in up and self._has_room(waiting.prefer, waiting):
            return waiting.prefer
        least = min(up, key=lambda replica: replica.tokens_in_flight, default=None)
        return least if least is not None and self._has_room(least, waiting) else None

    def _has_room(self, replica: Replica, waiting: _Waiting) -> bool:
        if replica.tokens_in_flight == 0:
            return True
        return not waiting.alone and replica.tokens_in_flight + waiting.cost <= self._bound
