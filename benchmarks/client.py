"""Measure the client's cost of requests: thousands of concurrent rollouts on one server.

    python benchmarks/client.py [--rollouts 8192] [--turns 2] [--backend torch|vllm|none]
        [--backlog 4096] [--resets 0.1] [--descriptors 1024]

A rollout requests 16 tokens after 32 prompt tokens, then again with the longer prompt. The server is another
process, with a model of 3 M random parameters; or with `none`, `client_server.py`, which has no model. Its
queue of new connections holds `backlog`, and it resets a share of the connections. Prints processor time,
which other processes affect little,
the memory of the client, and whether the server was considered dead. Fails if a rollout is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from inference_load import random_prompts
from inference_models import MODELS, make_model

from buckeye.base.process import raise_open_files_limit
from buckeye.config.inference import InferenceConfig
from buckeye.inference.client import InferenceClient, SamplingParams
from buckeye.launch.serve import served_model

NEW_TOKENS = 16
SIZE = "3M"
DEADLINE = 3600.0


async def rollout(client: InferenceClient, prompt: Sequence[int], seed: int, turns: int) -> None:
    """Run the turns of one conversation, each with the earlier samples in its prompt."""
    session, ids = client.session(), list(prompt)
    for turn in range(turns):
        params = SamplingParams(max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, seed=seed * turns + turn)
        generation = await session.generate(ids, params)
        assert len(generation.token_ids) == NEW_TOKENS, generation
        ids += generation.token_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """Server to measure, and its process."""

    url: str
    key: str | None
    model: str
    process: psutil.Process


@asynccontextmanager
async def started_server(backend: str, backlog: int, resets: float) -> AsyncIterator[Server]:
    """Start the server, and stop it at the end."""
    if backend == "none":
        args = (sys.executable, str(Path(__file__).with_name("client_server.py")), str(backlog), str(resets))
        process = await asyncio.create_subprocess_exec(*args, stdout=subprocess.PIPE)
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        yield Server(url=f"http://127.0.0.1:{port}", key=None, model="m", process=psutil.Process(process.pid))
        process.kill()
        await process.wait()
        return
    config = InferenceConfig.model_validate({"backend": backend, "log": {"level": "warning"}})
    with tempfile.TemporaryDirectory() as folder:
        async with served_model(make_model(Path(folder), SIZE), config=config) as served:
            (engine,) = psutil.Process().children()
            yield Server(url=served.base_url, key=served.api_key, model=served.model, process=engine)


async def measure(rollouts: int, turns: int, server: Server) -> None:
    """Run all rollouts at once, and print their cost."""
    prompts = random_prompts(rollouts, MODELS[SIZE]["vocab_size"], seed=0)
    client = InferenceClient([server.url], api_key=server.key, timeout=DEADLINE, model=server.model)
    async with client:
        await client.wait_ready(DEADLINE)
        await rollout(client, prompts[0], 0, 1)  # imports and the first connection are not part of it
        before = psutil.Process().memory_info().rss
        began, ours, theirs = time.monotonic(), time.process_time(), spent(server.process)
        await asyncio.gather(*(rollout(client, p, i, turns) for i, p in enumerate(prompts)))
        ours, theirs = time.process_time() - ours, spent(server.process) - theirs
        seconds = time.monotonic() - began
        metrics = client.metrics()
    calls = rollouts * turns
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before / 2**20
    print(
        f"{rollouts} rollouts of {turns} calls in {seconds:.0f} s, {grown:.0f} MiB more in the client at most"
    )
    print(f"client {ours:7.1f} s of processor time, {ours / calls * 1000:.2f} ms a call")
    print(f"server {theirs:7.1f} s of processor time, {theirs / calls * 1000:.2f} ms a call")
    print(f"taken out {metrics['inference/0/failures']:.0f}, asked again {metrics['inference/requeued']:.0f}")


def spent(process: psutil.Process) -> float:
    """Return the processor seconds of a process and its children."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--backend", choices=("torch", "vllm", "none"), default="torch")
    parser.add_argument("--backlog", type=int, default=4096)
    parser.add_argument("--resets", type=float, default=0.0)
    parser.add_argument("--descriptors", type=int)
    args = parser.parse_args()
    raise_open_files_limit()
    if args.descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (args.descriptors, args.descriptors))

    async def run() -> None:
        async with started_server(args.backend, args.backlog, args.resets) as server:
            await measure(args.rollouts, args.turns, server)

    asyncio.run(run())


if __name__ == "__main__":
    main()
