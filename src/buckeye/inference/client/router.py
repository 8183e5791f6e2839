"""Choice of the server for each request, and of the time at which a rollout may start."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from buckeye.errors import InferenceError
from buckeye.inference.client.replica import Replica

_RESERVATION_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    cost: int
    prefer: Replica | None
    exclusive: bool
    placed: asyncio.Future[Replica] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Router:
    """Router that assigns requests to servers, in order of arrival.

    The number of requests per server is not limited. But a rollout starts only when a server has a free slot,
    so that the time limit of the rollout does not run while it waits for others. A request waits up to
    `timeout` seconds for a server.
    """

    def __init__(self, replicas: Sequence[Replica], *, timeout: float) -> None:
        self._replicas = replicas
        self._timeout = timeout
        self._waiting: deque[_WaitingRequest] = deque()
        self._final_error: InferenceError | None = None
        self._waiting_rollouts: deque[asyncio.Future[None]] = deque()
        # Times at which reservations end. Each reservation is for a rollout that has sent no request yet.
        self._reservations: deque[float] = deque()

    async def wait_for_slot(self) -> None:
        """Wait until a server has a free slot for one more rollout. Rollouts start in order of arrival.

        The slot is reserved for one second, or until the next request. Return at once if a server does not
        report its capacity. Also return at once after `fail_all`; `acquire` then raises the error.
        """
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_rollouts.append(admitted)
        self._start_rollouts()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted in self._waiting_rollouts:
                self._waiting_rollouts.remove(admitted)
            raise

    @property
    def num_waiting_rollouts(self) -> int:
        """Number of rollouts that wait for a free slot."""
        return len(self._waiting_rollouts)

    async def acquire(self, cost: int, *, prefer: Replica | None = None, exclusive: bool = False) -> Replica:
        """Return a server for a request of `cost` tokens. The caller must release the server.

        Return `prefer` if it is up and has a free slot, else the server with the fewest tokens in flight.
        With `exclusive`, wait until the server has no other requests; the server is `prefer` if it is up.

        Raise `InferenceError` if no server is available in time, or after `fail_all`.
        """
        self.check()
        waiting = _WaitingRequest(cost, prefer, exclusive)
        self._waiting.append(waiting)
        self.place()
        try:
            async with asyncio.timeout(self._timeout):
                return await waiting.placed
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.placed.cancelled() and waiting.placed.exception() is None:
                self.release(waiting.placed.result(), cost)  # a server was assigned during cancellation
            if isinstance(error, TimeoutError):
                raise InferenceError(
                    f"no inference server accepted a request within {self._timeout:g} s ({self.describe()})",
                    code="BK-INFERENCE-UNREACHABLE",
                    hint="see the logs of the inference servers",
                ) from None
            raise

    def release(self, replica: Replica, cost: int) -> None:
        """Release a server that `acquire` returned for a request of `cost` tokens."""
        replica.tokens_in_flight -= cost
        replica.requests_in_flight -= 1
        self.place()
        self._start_rollouts()

    def place(self) -> None:
        """Assign servers to waiting requests. Call this when a server may have become available."""
        while self._waiting:
            first = self._waiting[0]
            replica = self._choose(first)
            if replica is None:
                return
            self._waiting.popleft()
            if not first.placed.done():
                replica.tokens_in_flight += first.cost
                replica.requests_in_flight += 1
                if self._reservations:
                    self._reservations.popleft()
                first.placed.set_result(replica)

    def fail_all(self, error: InferenceError) -> None:
        """Fail all waiting and future requests with `error`, until `resume`."""
        self._final_error = error
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.placed.done():
                waiting.placed.set_exception(error)
        self._start_rollouts()

    def check(self) -> None:
        """Raise the error of `fail_all`, if any."""
        if self._final_error is not None:
            raise self._final_error

    def resume(self) -> None:
        """Assign requests again. Call this when a server is up after `fail_all` or an exclusion."""
        self._final_error = None
        self.place()
        self._start_rollouts()

    def describe(self) -> str:
        """Return the state of all servers as text."""
        return "; ".join(
            f"{replica.url}: {replica.down_reason or f'{replica.tokens_in_flight} tokens in flight'}"
            for replica in self._replicas
        )

    def _start_rollouts(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting_rollouts and self._has_room():
            admitted = self._waiting_rollouts.popleft()
            if not admitted.done():
                self._reservations.append(loop.time() + _RESERVATION_SECONDS)
                loop.call_later(_RESERVATION_SECONDS, self._start_rollouts)
                admitted.set_result(None)

    def _has_room(self) -> bool:
        now = asyncio.get_running_loop().time()
        while self._reservations and self._reservations[0] <= now:
            self._reservations.popleft()
        if self._final_error is not None:
            return True
        return sum(replica.free_slots for replica in self._replicas if replica.is_up) > len(
            self._reservations
        )

    def _choose(self, waiting: _WaitingRequest) -> Replica | None:
        prefer, up = waiting.prefer, [replica for replica in self._replicas if replica.is_up]
        if prefer in up and (waiting.exclusive or prefer.free_slots > 0):
            up = [prefer]
        least = min(up, key=lambda replica: replica.tokens_in_flight, default=None)
        return None if least is not None and waiting.exclusive and least.requests_in_flight else least
