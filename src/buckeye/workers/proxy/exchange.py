"""What every dialect makes of a request: a call of the policy, and a way to tell its replies."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from buckeye.envs.base import Reply
from buckeye.workers.proxy.rollout import Call


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One request. `whole` makes its answer of the replies, `stream` the server-sent events of it; `streams`
    says which was asked for."""

    call: Call
    streams: bool
    whole: Callable[[Sequence[Reply]], dict[str, Any]]
    stream: Callable[[Sequence[Reply]], list[bytes]]


def new_id(prefix: str) -> str:
    """An id for an answer."""
    return f"{prefix}{uuid.uuid4().hex}"
