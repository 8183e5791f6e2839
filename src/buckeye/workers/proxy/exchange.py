"""Common form of a request in all APIs: a call of the policy, and functions that format its replies."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from buckeye.envs.base import Reply
from buckeye.workers.proxy.rollout import PolicyCall


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One request.

    `to_json` formats the replies as a complete response, `to_events` as server-sent events. `is_streaming` is
    True if the client requested a stream.
    """

    call: PolicyCall
    is_streaming: bool
    to_json: Callable[[Sequence[Reply]], dict[str, Any]]
    to_events: Callable[[Sequence[Reply]], list[bytes]]


def new_id(prefix: str) -> str:
    """Return a new id for a response."""
    return f"{prefix}{uuid.uuid4().hex}"
