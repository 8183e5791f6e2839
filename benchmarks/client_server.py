"""Server without a model for `client.py` and `held.py`: it replies to requests, and may reset connections.

    python benchmarks/client_server.py BACKLOG RESETS [TOKENS SECONDS json]

Prints its port. RESETS is the share of connections that it resets after their first request. A reply has
TOKENS tokens (16) and arrives after SECONDS (0.02). With `json`, no reply has arrays.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

import msgspec

from buckeye.inference.types import ARRAYS_TYPE, json_to_arrays

MODEL = "m"
TOKENS, SECONDS = (int(sys.argv[3]), float(sys.argv[4])) if len(sys.argv) > 4 else (16, 0.02)
IDS = [10 + n % 200 for n in range(TOKENS)]
LOGPROBS = [-1.0 - n / 7 for n in range(TOKENS)]
CHOICE = {
    "index": 0,
    "token_ids": IDS,
    "logprobs": {
        "content": [
            {"token": f"token_id:{token}", "logprob": value}
            for token, value in zip(IDS, LOGPROBS, strict=True)
        ]
    },
    "finish_reason": "length",
    "weight_versions": [{"version": "default", "start": 0, "end": TOKENS}],
}
REPLIES = {
    "/health": {},
    "/v1/models": {"data": [{"id": MODEL, "owned_by": "buckeye"}]},
    "/collective_rpc": {"results": [{"process": "1", "max_num_seqs": 128 if SECONDS < 1 else 8192}]},
    "/inference/v1/generate": {"choices": [CHOICE]},
    "/v1/completions": {"choices": [CHOICE | {"logprobs": {"token_logprobs": LOGPROBS}}]},
}
SAMPLING = (b"/inference/v1/generate", b"/v1/completions")
CONTENTS = {
    route.encode(): ("application/json", json.dumps(reply).encode()) for route, reply in REPLIES.items()
}
if "json" not in sys.argv:
    _, content = CONTENTS[b"/inference/v1/generate"]
    CONTENTS[b"/inference/v1/generate"] = ARRAYS_TYPE, msgspec.msgpack.encode(json_to_arrays(content))


class Connection(asyncio.Protocol):
    """Connection that answers complete requests."""

    def __init__(self, resets: float) -> None:
        self._resets = random.random() < resets
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        given, found, body = self._received.partition(b"\r\n\r\n")
        length = given.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if not found or len(body) < int(length or 0):
            return
        self._received.clear()
        if self._resets:
            self._transport.abort()
            return
        route = bytes(given.split()[1])
        kind, content = CONTENTS[route]
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n\r\n"
        reply = head.encode() + content
        asyncio.get_running_loop().call_later(
            SECONDS if route in SAMPLING else 0.02, self._transport.write, reply
        )


async def main() -> None:
    """Serve until the process ends."""
    backlog, resets = int(sys.argv[1]), float(sys.argv[2])
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(resets), "127.0.0.1", 0, backlog=backlog)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
