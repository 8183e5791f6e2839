"""What can go wrong between Buckeye and a worker. None of it leaves this package: a rollout's becomes its
outcome, and what keeps an environment from being loaded becomes a message for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from buckeye.envs.base import Boundary
from buckeye.envs.outcomes import boundary_of
from buckeye.envs.stdlib_only.outcomes import checked_frames, place_of


class Fault(Exception):
    """Something failed at `boundary`; `kind` is the class of the error there, or what befell the worker;
    `trace` are the frames of the environment that it came through."""

    def __init__(self, boundary: Boundary, kind: str, message: str, trace: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.boundary, self.kind, self.message, self.trace = boundary, kind, message, tuple(trace)

    def __str__(self) -> str:
        return f"{self.boundary}: {self.kind}: {self.message}{place_of(self.trace)}"


class WorkerFault(Fault):
    """The worker itself is gone, or had to be ended. `kind` says how: died, killed, silent, stuck, flooded,
    memory, protocol, start."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__("worker", kind, message)

    @property
    def by_chance(self) -> bool:
        """Whether another worker may well do better with the same."""
        return self.kind in ("killed", "silent")


def fault_of(error: Mapping[str, Any]) -> Fault:
    """The fault that a worker has sent as `worker_side.outcomes.failure` makes it."""
    trace = checked_frames(error.get("trace"))
    return Fault(boundary_of(error["boundary"]), str(error["type"]), str(error["message"]), trace)
