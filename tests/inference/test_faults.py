"""Broken connections to a healthy server: nothing answered is repeated, and the server stays in use."""

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager

from hypothesis import given
from hypothesis import strategies as st

from buckeye.inference.client import InferenceClient, SamplingParams

from .test_client import CHOICE, GENERATE

ROUTES = {
    "/health": {},
    "/v1/models": {"data": [{"id": "m", "owned_by": "buckeye"}]},
    "/collective_rpc": {"results": [{"process": "first", "max_num_seqs": 4}]},
    GENERATE: {"choices": [CHOICE]},
}
REPLIED = ("ok", "close", "chunked", "until closed")
FAULTS = (*REPLIED, "reset before reading", "reset", "cut head", "cut body", "garbage")


class FaultyServer:
    """Server whose connections break at chosen points; `faults` holds one choice per request.

    After these choices, the server works. `received` and `answered` count the generations by prompt.
    """

    def __init__(self, faults):
        self.faults = list(faults)
        self.received, self.answered = Counter(), Counter()

    async def serve(self, reader, writer):
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort() if writer.transport.get_write_buffer_size() == 0 else writer.close()

    async def _exchange(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        fault = self.faults.pop() if self.faults else "ok"
        if fault == "reset before reading":
            return False
        path = head.split(b" ")[1].decode()
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        prompt = json.loads(body)["token_ids"][0] if path == GENERATE else None
        self.received[prompt] += 1
        if fault == "reset":
            return False
        self.answered[prompt] += fault in REPLIED
        content = json.dumps(ROUTES[path]).encode()
        frame = {
            "chunked": b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(content), content),
            "until closed": b"\r\n" + content,
            "close": b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content),
        }.get(fault, b"content-length: %d\r\n\r\n%b" % (len(content), content))
        reply = b"HTTP/1.1 200 OK\r\n" + frame
        cut = {"cut head": 9, "cut body": len(reply) - 1}.get(fault)
        writer.write(b"SSH-2.0\r\n" if fault == "garbage" else reply[:cut])
        await writer.drain()
        if fault == "until closed":
            writer.close()
        return fault in ("ok", "chunked")


@asynccontextmanager
async def client_of(faulty):
    server = await asyncio.start_server(faulty.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, InferenceClient([url], api_key=None, model="m", timeout=60) as client:
        yield client


def not_all_checks_fail(faults):
    """Return True if a check of the health succeeds: six broken connections in a row are a lost server."""
    return sum(fault not in REPLIED for fault in faults) < 6


@given(st.lists(st.sampled_from(FAULTS), max_size=12).filter(not_all_checks_fail), st.integers(1, 12))
def test_no_fault_repeats_an_answer_or_excludes_the_server(faults, rollouts):
    faulty = FaultyServer([])

    async def run():
        async with client_of(faulty) as client:
            await client.wait_ready(60)
            faulty.faults = list(faults)
            calls = [client.generate([i], SamplingParams(max_tokens=2, seed=i)) for i in range(rollouts)]
            generations = await asyncio.gather(*calls)
            return generations, client.metrics()

    generations, metrics = asyncio.run(run())
    assert all(generation.token_ids == CHOICE["token_ids"] for generation in generations)
    assert all(faulty.answered[i] == 1 for i in range(rollouts))
    assert metrics["inference/0/failures"] == 0
    assert metrics["inference/queued"] == metrics["inference/0/tokens_in_flight"] == 0
