"""Errors between Buckeye and a worker. They stay inside this package.

`WorkerEnvironment` turns an error of a rollout into an outcome, and an error of loading into a BuckeyeError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from buckeye.envs.outcome_validation import parse_boundary
from buckeye.envs.stdlib_only.outcomes import Boundary, checked_frames, location_of


class BoundaryError(Exception):
    """Failure at `boundary`, the part that failed, such as `load`, `step` or `score`.

    `kind` is the class name of the exception, or a kind of WorkerError. `trace` has the stack frames in the
    environment's code.
    """

    def __init__(self, boundary: Boundary, kind: str, message: str, trace: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.boundary, self.kind, self.message, self.trace = boundary, kind, message, tuple(trace)

    def __str__(self) -> str:
        kind = "" if self.kind == "OutcomeError" else f"{self.kind}: "
        place = location_of(self.trace)
        return f"{self.boundary}: {kind}{self.message}{'' if place in self.message else place}"


class WorkerError(BoundaryError):
    """End of a worker: its process ended, or Buckeye had to kill it.

    `kind` is one of died, killed, silent, stuck, flooded, memory, protocol, start and closed.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__("worker", kind, message)

    @property
    def is_transient(self) -> bool:
        """True if a retry in another worker may succeed. A stuck worker ended because of another request."""
        return self.kind in ("killed", "silent", "stuck")


def parse_boundary_error(error: Mapping[str, Any]) -> BoundaryError:
    """Return the error in a worker's `error` message, which has the format of `outcomes.failure`."""
    trace = checked_frames(error.get("trace"))
    return BoundaryError(parse_boundary(error["boundary"]), str(error["type"]), str(error["message"]), trace)
