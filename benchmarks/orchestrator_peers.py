"""Rollouts of other libraries for `orchestrator.py`, in an interpreter that has the library.

    PYTHON benchmarks/orchestrator_peers.py trl|verifiers URL MODEL ROLLOUTS IN_FLIGHT

A rollout asks twice for 256 tokens. Prints the version of the library and the milliseconds of processor time
per rollout. Only what samples and records tokens runs: TRL's asynchronous rollout worker without scoring and
queues, and the client for training of verifiers without its harness program. Neither writes a batch.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "PRIME_API_KEY": "none"}

QUESTION = "what would a benchmark say if it had a voice and some time to think about words"
NEW_TOKENS = 256
Ask = Callable[[], Awaitable[None]]


@asynccontextmanager
async def trl(url: str, folder: str, in_flight: int) -> AsyncIterator[Ask]:
    """Rollouts of TRL's worker. Its first reply counts as a call of a tool, which returns at once."""
    import aiohttp
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import async_rollout_worker as library

    def parse(tokenizer: Any, ids: list[int], *, prefix: list[int], tools: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        call = {"type": "function", "function": {"name": "again", "arguments": {}}}
        return message | ({"tool_calls": [call]} if len(prefix) < NEW_TOKENS else {})

    library.parse_response = parse
    worker = object.__new__(library._AsyncRolloutLoop)
    fields = {"tokenizer": AutoTokenizer.from_pretrained(folder), "vllm_server_url": url, "model_name": "m"}
    fields |= {"chat_template": None, "chat_template_kwargs": {}, "max_tool_calling_iterations": 1}
    fields |= {"max_tokens": NEW_TOKENS, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}
    fields |= {"repetition_penalty": 1.0, "request_timeout": 600, "lora_name": None}
    fields |= {"_fork_threshold_tokens": 1024, "_counters": defaultdict(float)}
    fields |= {"_rates": defaultdict(lambda: [0.0, 0.0]), "_push_rollout_metrics": lambda **_: None}
    vars(worker).update(fields)

    async def again() -> str:
        return "again"

    async def rollout() -> None:
        prompt = [{"role": "user", "content": QUESTION}]
        _, ids, sequences, *_ = await worker._generate_one(prompt, {"again": again}, [])
        assert len(ids) == 2 * NEW_TOKENS
        assert sequences

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight)) as worker.session:
        yield rollout


@asynccontextmanager
async def verifiers(url: str, folder: str, in_flight: int) -> AsyncIterator[Ask]:
    """Calls of the client of verifiers that records tokens."""
    from renderers import config_from_name
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    config = TrainClientConfig(
        base_url=f"{url}/v1", renderer=config_from_name("default"), renderer_model_name=folder
    )
    client, sampling = TrainClient(config), SamplingConfig(max_tokens=NEW_TOKENS)

    async def rollout() -> None:
        messages = [{"role": "user", "content": QUESTION}]
        for _ in range(2):
            body = {"model": "m", "messages": messages}
            response = await client.get_response(ChatDialect(), body, sampling)
            assert response.tokens is not None
            assert len(response.tokens.completion_ids) == NEW_TOKENS
            said = {"role": "assistant", "content": response.message.content or ""}
            messages += [said, {"role": "user", "content": "again"}]

    yield rollout


async def measure(name: str, url: str, folder: str, rollouts: int, in_flight: int) -> None:
    """Run all rollouts, and print their cost."""
    library = {"trl": trl, "verifiers": verifiers}[name]
    async with library(url, folder, in_flight) as rollout:
        await rollout()  # loads what the first one needs
        slots = asyncio.Semaphore(in_flight)

        async def in_slot() -> None:
            async with slots:
                await rollout()

        began = time.process_time()
        await asyncio.gather(*(in_slot() for _ in range(rollouts)))
        cost = 1000 * (time.process_time() - began) / rollouts
    print(f"{name} {importlib.metadata.version(name)} {cost:.2f}")


if __name__ == "__main__":
    peer, server, model, count, width = sys.argv[1:]
    asyncio.run(measure(peer, server, model, int(count), int(width)))
