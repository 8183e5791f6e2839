"""Measure what HTTP adds to a call of the policy: direct calls, and calls of agents in another process.

    python benchmarks/wire.py [--calls 2000] [--messages 10] [--characters 1000]

Every rollout requests the reply to the same conversation repeatedly; the policy answers immediately with 300
characters. The agents are one other process that uses plain HTTP, so that only the endpoint is measured:
processor time per call of the process with the policy, which waiting does not change.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time

import msgspec

from buckeye.envs.base import Message, Reply, Tool
from buckeye.workers.proxy import serve

AGENTS = r"""
import asyncio, sys

async def agent(port, request, calls):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(calls):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(l for l in head.split(b"\r\n") if l.lower().startswith(b"content-length:"))
        await reader.readexactly(int(length.split(b":")[1]))
    writer.close()

async def main():
    port, calls = int(sys.argv[1]), int(sys.argv[2])
    requests = [bytes.fromhex(line) for line in sys.stdin]
    await asyncio.gather(*(agent(port, request, calls) for request in requests))

asyncio.run(main())
"""
SAID = "word " * 60


class Instant:
    """Policy that answers immediately."""

    async def chat(self, messages: list[Message], *, tools: list[Tool] = ()) -> Reply:  # type: ignore[assignment]
        """Return a constant reply."""
        return Reply(text=SAID, finish_reason="stop", message={"role": "assistant", "content": SAID})


def conversation(messages: int, characters: int) -> list[Message]:
    """Return turns of a user and an assistant, the last one by the user."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": "x" * characters} for i in range(messages - 1 + messages % 2)]


async def direct(messages: list[Message], calls: int) -> float:
    """Return the processor seconds of a direct call."""
    policy, began = Instant(), time.process_time()
    for _ in range(calls):
        await policy.chat(messages)
    return (time.process_time() - began) / calls


async def by_wire(messages: list[Message], calls: int, rollouts: int) -> float:
    """Return the processor seconds of a call over HTTP, with `rollouts` concurrent rollouts."""
    open_ends = [serve(Instant()) for _ in range(rollouts)]
    endpoints = [await end.__aenter__() for end in open_ends]
    port = endpoints[0].root_url.split(":")[2].split("/")[0]
    agents = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", AGENTS, port, str(calls // rollouts)), stdin=subprocess.PIPE
    )
    body = msgspec.json.encode({"model": "policy", "messages": messages})
    began = time.process_time()
    requests = "\n".join(request(e.base_url, e.api_key, body).hex() for e in endpoints)
    await agents.communicate(requests.encode())
    spent = time.process_time() - began
    for end in open_ends:
        await end.__aexit__(None, None, None)
    assert agents.returncode == 0
    return spent / (calls // rollouts * rollouts)


def request(base_url: str, key: str, body: bytes) -> bytes:
    """Return an HTTP request for a chat completion."""
    host, _, path = base_url.removeprefix("http://").partition("/")
    head = (
        f"POST /{path}/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--messages", type=int, default=10)
    parser.add_argument("--characters", type=int, default=1000)
    args = parser.parse_args()
    messages = conversation(args.messages, args.characters)
    await by_wire(messages, 64, 1)  # imports and the first connection are not part of it
    print(f"direct            {await direct(messages, args.calls) * 1000:6.3f} ms")
    for rollouts in (1, 64):
        print(f"wire, {rollouts:2d} rollouts {await by_wire(messages, args.calls, rollouts) * 1000:6.3f} ms")


if __name__ == "__main__":
    asyncio.run(main())
