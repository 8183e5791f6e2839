"""Routing: which server gets a request (the least loaded, or the one that has its prefix cached), and when a
rollout begins.
"""

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
    exclusive: bool
    placed: asyncio.Future[Replica] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Router:
    """Router of requests to servers that are up, in order of arrival.

    The number of requests per server is not limited. But a rollout begins only when a server has room for it,
    so that its time limit does not run while it waits for others. `timeout` is the maximum wait of a request
    for a server that is up, in seconds.
    """

    def __init__(self, replicas: Sequence[Replica], *, timeout: float) -> None:
        self._replicas = replicas
        self._timeout = timeout
        self._waiting: deque[_Waiting] = deque()
        self._hopeless: InferenceError | None = None
        self._beginning: deque[asyncio.Future[None]] = deque()
        # deadlines of the reserved slots of begun rollouts without a request yet
        self._begun: deque[float] = deque()

    async def wait_for_slot(self) -> None:
        """Wait until a server that is up has room for one more rollout, in order of arrival.

        Its slot stays reserved for one second: a rollout without a request by then is busy with other work.
        Return at once if servers do not report their capacity, or if no server will come back; `acquire`
        raises that error.
        """
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
    def num_waiting_rollouts(self) -> int:
        """Number of rollouts that wait for room."""
        return len(self._beginning)

    async def acquire(self, cost: int, *, prefer: Replica | None = None, exclusive: bool = False) -> Replica:
        """Return a server for a request of `cost` tokens: `prefer` if it is up and has room, else the one
        with the fewest tokens. With `exclusive`, a server without other requests, and `prefer` while it is up.
        The caller must release it.

        Raise `InferenceError` if none is available in time, or if no server will come back.
        """
        self.check()
        waiting = _Waiting(cost, prefer, exclusive)
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
        """Release a server after a request of `cost` tokens."""
        replica.tokens_in_flight -= cost
        replica.requests_in_flight -= 1
        self.place()
        self._begin()

    def place(self) -> None:
        """Place waiting requests while servers are available. Call it whenever that may have changed."""
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

    def fail_all(self, error: InferenceError) -> None:
        """Fail all waiting and future requests with `error`: no server will come back."""
        self._hopeless = error
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.placed.done():
                waiting.placed.set_exception(error)
        self._begin()

    def check(self) -> None:
        """Raise the error of `fail_all`, if any."""
        if self._hopeless is not None:
            raise self._hopeless

    def resume(self) -> None:
        """Resume placing requests: a server is up again."""
        self._hopeless = None
        self.place()
        self._begin()

    def describe(self) -> str:
        """Return the state of all servers as text."""
        return "; ".join(
            f"{replica.url}: {f'{replica.tokens_in_flight} tokens in flight' if replica.is_up else replica.down_reason}"
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
        return sum(replica.free_slots for replica in self._replicas if replica.is_up) > len(self._begun)

    def _choose(self, waiting: _Waiting) -> Replica | None:
        prefer, up = waiting.prefer, [replica for replica in self._replicas if replica.is_up]
        if prefer in up and (waiting.exclusive or prefer.free_slots > 0):
            up = [prefer]
        least = min(up, key=lambda replica: replica.tokens_in_flight, default=None)
        return None if least is not None and waiting.exclusive and least.requests_in_flight else least
