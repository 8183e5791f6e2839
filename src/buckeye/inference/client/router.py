"""Choice of the server for each request, and of the time at which a rollout may start."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from buckeye.errors import InferenceError
from buckeye.inference.client.replica import Replica

_RESERVATION_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    cost: int
    exclusive: bool
    arrival: int
    placed: asyncio.Future[Replica] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Router:
    """Router that assigns requests to servers.

    Each server gets at most `Replica.max_requests` requests at a time; the others wait in order of arrival.
    A request whose preferred server is full waits for this server while other requests can use the rest. A
    rollout starts only when a server has a free slot, so that the time limit of the rollout does not run
    while it waits for others.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        # Requests that wait for their preferred server, and under None those without a preference.
        self._waiting: dict[Replica | None, deque[_WaitingRequest]] = defaultdict(deque)
        self._arrivals = itertools.count()
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

    @property
    def num_queued_requests(self) -> int:
        """Number of requests that wait for a slot of a server."""
        return sum(map(len, self._waiting.values()))

    async def acquire(self, cost: int, *, prefer: Replica | None = None, exclusive: bool = False) -> Replica:
        """Return a server for a request of `cost` tokens. The caller must release the server.

        Return `prefer` if it is up and has a free slot, else the server with the fewest tokens in flight.
        With `exclusive`, wait until the server has no other requests; the server is `prefer` if it is up.

        Raise `InferenceError` after `fail_all`.
        """
        self.check()
        waiting = _WaitingRequest(cost, exclusive, next(self._arrivals))
        self._waiting[prefer].append(waiting)
        if prefer is None or not self._assign(prefer):
            self.place()
        try:
            return await waiting.placed
        except BaseException:
            if waiting.placed.done() and not waiting.placed.cancelled() and not waiting.placed.exception():
                self.release(waiting.placed.result(), cost)  # a server was assigned during cancellation
            elif waiting in self._waiting[prefer]:
                self._waiting[prefer].remove(waiting)
            raise

    def release(self, replica: Replica, cost: int) -> None:
        """Release a server that `acquire` returned for a request of `cost` tokens."""
        replica.tokens_in_flight -= cost
        replica.requests_in_flight -= 1
        if not replica.is_up:
            self.place()  # its waiting requests
        while self._assign(replica):
            pass
        self._start_rollouts()

    def place(self) -> None:
        """Assign servers to waiting requests, the server with the fewest tokens in flight first."""
        free = [replica for replica in self._replicas if replica.has_slot]
        while free and any(self._waiting.values()):
            replica = min(free, key=lambda replica: replica.tokens_in_flight)
            if not self._assign(replica):
                free.remove(replica)

    def _assign(self, replica: Replica) -> bool:
        """Assign a server to a waiting request. Return False if no request can use the server now."""
        queue = self._next_queue(replica) if replica.has_slot else None
        if not queue or (queue[0].exclusive and replica.requests_in_flight):
            return False
        waiting = queue.popleft()
        if not waiting.placed.done():
            replica.tokens_in_flight += waiting.cost
            replica.requests_in_flight += 1
            if self._reservations:
                self._reservations.popleft()
            waiting.placed.set_result(replica)
        return True

    def _next_queue(self, replica: Replica) -> deque[_WaitingRequest] | None:
        """Return the queue whose first request a free server must run.

        A request for another server comes last, and only if that server has no free slot.
        """
        own, others = [], []
        for preferred, queue in self._waiting.items():
            if not queue:
                continue
            if preferred is None or preferred is replica or not preferred.is_up:
                own.append(queue)
            elif not preferred.has_slot and not queue[0].exclusive:
                others.append(queue)
        return min(own or others, key=lambda queue: queue[0].arrival, default=None)

    def fail_all(self, error: InferenceError) -> None:
        """Fail all waiting and future requests with `error`, until `resume`."""
        self._final_error = error
        for queue in self._waiting.values():
            while queue:
                waiting = queue.popleft()
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
