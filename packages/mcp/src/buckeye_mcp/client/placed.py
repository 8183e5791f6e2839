"""To which gateway a session goes where a run has several on its nodes: the next in turn that answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from buckeye.base.keys import key
from buckeye_mcp.gateway.settings import API_KEY_VARIABLE
from buckeye_mcp.tasks.task_schema import HttpServer

PLACES_VARIABLE = "BUCKEYE_GATEWAYS"
"""What the run says: the addresses of the gateways for each port of this machine that tasks name, as JSON."""

_ANSWER_SECONDS = 3.0
_TURNS: dict[int, Iterator[int]] = {}


async def at_a_gateway(server: HttpServer) -> HttpServer:
    """The server behind a gateway of the run; itself where its address has none. If none answers it is the
    one whose turn it is."""
    parts = urlsplit(server.url)
    places = _places().get(str(parts.port), []) if parts.hostname in ("localhost", "127.0.0.1") else []
    if not places:
        return server
    turn = next(_TURNS.setdefault(parts.port or 0, itertools.count()))
    in_turn = [places[(turn + number) % len(places)] for number in range(len(places))]
    chosen = in_turn[0]
    for place in in_turn:
        if await answers(place):
            chosen = place
            break
    url = parts._replace(netloc=urlsplit(chosen).netloc).geturl()
    headers = with_key(server.headers, key(API_KEY_VARIABLE))
    return server.model_copy(update={"url": url, "headers": headers})


def with_key(headers: Mapping[str, str], own: str) -> dict[str, str]:
    """The headers; where they name no key, with `own`, if that is one."""
    named = any(name.lower() == "authorization" for name in headers)
    return {**headers, **({"Authorization": f"Bearer {own}"} if own and not named else {})}


async def is_lost(server: HttpServer) -> bool:
    """Whether a server is behind a gateway of the run that does not answer any more."""
    netloc = urlsplit(server.url).netloc
    known = {urlsplit(place).netloc for places in _places().values() for place in places}
    return netloc in known and not await answers(server.url)


async def answers(url: str) -> bool:
    """Whether somebody listens there."""
    parts = urlsplit(url)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_ANSWER_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.close()
        return True
    return False


def _places() -> dict[str, list[str]]:
    said = os.environ.get(PLACES_VARIABLE)
    return dict(json.loads(said)) if said else {}
