"""Waiting for a server of this machine that is not up, as a gateway that died and is started again."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit

from buckeye.gate import is_loopback

_PAUSE_SECONDS = 0.2


async def until_it_listens(url: str, seconds: float) -> None:
    """Wait so long for an address of this machine; what then does not listen is somebody else's error."""
    parts = urlsplit(url)
    if not seconds or not is_loopback(parts.hostname or ""):
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                try:
                    _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
                except OSError:
                    await asyncio.sleep(_PAUSE_SECONDS)
                else:
                    writer.close()
                    return
