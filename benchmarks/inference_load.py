"""HTTP load for the inference benchmark, from a client that uses little of the shared cores.

One connection carries one request at a time; bodies are kept as bytes until the clock has stopped.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

PROMPT_TOKENS = 32
NEW_TOKENS = 96
_DEADLINE = 900.0


KEY = "benchmark"
"""API key of the servers that the benchmark starts."""

os.environ["BUCKEYE_INFERENCE_KEY"] = KEY


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Server on this machine, and the model that it serves."""

    port: int
    model: str


def random_prompts(count: int, vocab: int, seed: int) -> list[list[int]]:
    """Return `count` prompts of random token ids, [count][PROMPT_TOKENS]."""
    numbers = random.Random(seed)
    return [[numbers.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


async def throughput(
    endpoint: Endpoint, prompts: list[list[int]], concurrency: int, *, new_tokens: int = NEW_TOKENS
) -> float:
    """Return sampled tokens per second while `concurrency` clients request one completion per prompt."""
    bodies = iter([_body(endpoint, prompt, seed, new_tokens) for seed, prompt in enumerate(prompts)])
    answers: list[bytes] = []
    connections = await asyncio.gather(
        *(asyncio.open_connection("127.0.0.1", endpoint.port) for _ in range(concurrency))
    )
    started = time.perf_counter()
    async with asyncio.timeout(_DEADLINE):
        await asyncio.gather(*(_ask(*connection, bodies, answers) for connection in connections))
    seconds = time.perf_counter() - started
    for _, writer in connections:
        writer.close()
    return sum(_count(answer, new_tokens) for answer in answers) / seconds


def _body(endpoint: Endpoint, prompt: list[int], seed: int, new_tokens: int) -> bytes:
    fields = {
        "model": endpoint.model,
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "seed": seed,
    }
    return _post("/v1/completions", fields)


def _post(path: str, fields: dict[str, object]) -> bytes:
    content = json.dumps(fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEY}\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bodies: Iterator[bytes], answers: list[bytes]
) -> None:
    for body in bodies:
        writer.write(body)
        answers.append(await _answer(reader))


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    content = await reader.readexactly(length)
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise RuntimeError(f"The server answered {head.splitlines()[0]!r}: {content[:500]!r}")
    return content


def _count(answer: bytes, expected: int) -> int:
    """Return the number of tokens in an answer.

    Raises RuntimeError if the tokens or their log-probs are not as many as requested.
    """
    choice = json.loads(answer)["choices"][0]
    counts = {len(choice["token_ids"]), len(choice["logprobs"]["token_logprobs"])}
    if counts != {expected}:
        raise RuntimeError(f"An answer has {counts} tokens and log-probs; {expected} were asked for.")
    return expected


class Streams:
    """Running completions with the arrival time of each token, which shows pauses from outside."""

    def __init__(self, endpoint: Endpoint, prompts: list[list[int]], new_tokens: int) -> None:
        self._endpoint = endpoint
        self._prompts = prompts
        self._new_tokens = new_tokens
        self.arrivals: list[list[float]] = [[] for _ in prompts]
        """`time.perf_counter` of every event of every stream."""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Streams:
        self._tasks = [asyncio.create_task(self._follow(index)) for index in range(len(self._prompts))]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def more(self, count: int) -> None:
        """Wait until every stream has received `count` more tokens."""
        goals = [len(times) + count for times in self.arrivals]
        async with asyncio.timeout(_DEADLINE):
            while any(len(times) < goal for times, goal in zip(self.arrivals, goals, strict=True)):
                for task in self._tasks:
                    if task.done():
                        raise RuntimeError(f"A stream ended early: {task.exception()!r}")
                await asyncio.sleep(0.002)

    async def _follow(self, index: int) -> None:
        fields = {
            "model": self._endpoint.model,
            "prompt": self._prompts[index],
            "max_tokens": self._new_tokens,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
        }
        reader, writer = await asyncio.open_connection("127.0.0.1", self._endpoint.port)
        writer.write(_post("/v1/completions", fields))
        try:
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    self.arrivals[index].append(time.perf_counter())
        finally:
            writer.close()
