"""A group while it is played: since which policy version, and how its sampling is ended early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from buckeye.inference.client import Session


class Flight:
    """One group in flight, of `size` rollouts. `now` gives the policy version of the engines."""

    def __init__(self, index: int = 0, size: int = 1, *, now: Callable[[], int] = lambda: 0) -> None:
        self.index = index
        self.size = size
        self.is_cut = False
        """Whether nothing more is sampled for it."""
        self.plays = 0
        """Attempts at its rollouts that have ended, those that failed included."""
        self._now = now
        self._began: tuple[int, float] | None = None
        self._sessions: list[Session] = []
        self._aborting: list[asyncio.Task[None]] = []

    @property
    def version(self) -> int:
        """No token of it is older. While none of its rollouts has begun, that is the present version."""
        return self._now() if self._began is None else self._began[0]

    @property
    def seconds(self) -> float:
        """How long it has been played."""
        return 0.0 if self._began is None else asyncio.get_running_loop().time() - self._began[1]

    def begin(self) -> None:
        """One of its rollouts begins."""
        if self._began is None:
            self._began = self._now(), asyncio.get_running_loop().time()

    def samples_with(self, session: Session) -> None:
        """What is asked in this session ends when the group is cut."""
        self._sessions.append(session)

    def cut(self) -> None:
        """Sample no more for it: open replies end with what they have, later ones are empty."""
        if not self.is_cut:
            self.is_cut = True
            self._aborting = [asyncio.create_task(session.abort()) for session in self._sessions]


def leaves_room(
    size: int, due: int, waiting: Mapping[int, int], *, open_places: int, batch: int, batch_size: int
) -> bool:
    """Whether a group of `size` rollouts, which batch `due` is the last to be able to have, can have some of
    the `open_places` of batch `batch`: all that has to be used sooner still finds a place in time. `waiting`
    says how many rollouts, finished or in flight, have which last batch. (The test of earliest deadlines
    first: up to each deadline, what is due fits.)"""
    needed = 0
    for other_due in sorted(other for other in waiting if batch <= other < due):
        needed += waiting[other_due]
        if needed > max(0, open_places - size) + (other_due - batch) * batch_size:
            return False
    return True
