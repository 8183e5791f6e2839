"""What can go wrong between Buckeye and a worker. None of it leaves this package: a rollout's becomes its
outcome, and what keeps an environment from being loaded becomes a message for a person."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

from buckeye.envs.base import Boundary
from buckeye.envs.workers.guest.traces import checked_frames, place_of


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


_KEY = re.compile(r"\b[A-Z][A-Z0-9_]*_(?:KEY|TOKEN|SECRET)S?\b")
_ABSENT = re.compile(r"missing|must be set|not set|credential|KeyError|not found|required", re.I)


def how_to_pass(what: str, given: Collection[str]) -> str:
    """What to do about a failure, where `what` happened says that a key is missing which the environment was
    not `given`; else nothing."""
    names = [name for name in dict.fromkeys(_KEY.findall(what)) if name not in given]
    if not names or not _ABSENT.search(what):
        return ""
    return (
        f"An environment sees the variables that it is given by name: --variables {names[0]}, or "
        f'variables = ["{names[0]}"] below its [[env]]'
    )


def fault_of(error: Mapping[str, Any]) -> Fault:
    """The fault that a worker has sent as `guest.outcomes.failure` makes it."""
    trace = checked_frames(error.get("trace"))
    return Fault(boundary_of(error["boundary"]), str(error["type"]), str(error["message"]), trace)


def boundary_of(name: object) -> Boundary:
    """The boundary of that name; "step" for one that there is not."""
    for boundary in get_args(Boundary):
        if boundary == name:
            return boundary
    return "step"
