"""Sleep of an engine that shares its device with the trainer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from buckeye.inference.client.replica import Replica


@dataclass(frozen=True, kw_only=True, slots=True)
class Sleep:
    """State in which an engine has no KV cache and, with `offload`, no weights on its device."""

    offload: bool


async def put_to_sleep(replica: Replica, sleep: Sleep) -> None:
    """Abort all requests, and release the memory of the engine.

    Weights that an adapter is applied to move to main memory. Others are dropped, because the next update
    replaces them.
    """
    await replica.call("POST", "/pause?mode=abort")
    if not replica.can_sleep:
        return
    if sleep.offload:
        await replica.call("POST", f"/sleep?level={1 if replica.adapter else 2}&mode=abort")
    else:
        await replica.call("POST", "/release_kv_cache_memory")


async def wake_up(replica: Replica, tag: Literal["weights", "kv_cache"]) -> None:
    """Restore the memory that `put_to_sleep` released, if any."""
    if replica.can_sleep:
        started = time.monotonic()
        await replica.call("POST", f"/wake_up?tags={tag}")
        replica.wake_seconds += time.monotonic() - started
