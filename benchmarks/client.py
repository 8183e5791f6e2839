"""Measure the client's cost of requests: thousands of concurrent rollouts on one server.

    python benchmarks/client.py [--rollouts 8192] [--turns 2] [--backend torch|vllm|none]
        [--backlog 4096] [--resets 0.1] [--descriptors 1024] [--batch 20]

A rollout requests 16 tokens after 32 prompt tokens, then again with the longer prompt. The server is another
process, with a model of 3 M random parameters; or with `none`, `client_server.py`, which has no model. Its
queue of new connections holds `backlog`, and it resets a share of the connections. Prints processor time,
which other processes affect little,
the memory of the client, and whether the server was considered dead. Fails if a rollout is lost.

With `--batch`, a batch of MILLIONS of tokens is written meanwhile, as the orchestrator writes it. Prints
how late the timers of the event loop are, before and during it, and the seconds of each part.
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

import numpy as np
import psutil
from inference_load import random_prompts
from inference_models import MODELS, make_model

from buckeye.base.process import RunIdentity, raise_open_files_limit
from buckeye.config.inference import InferenceConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.base import Outcome, Task
from buckeye.inference.client import Generation, InferenceClient, SamplingParams
from buckeye.inference.render import ChatRenderer
from buckeye.launch.serve import served_model
from buckeye.orchestrator.batch import BatchSender, advantages_of, batch_metrics, make_batch, write_rollouts
from buckeye.orchestrator.coroutines import collect_garbage
from buckeye.orchestrator.loop_watch import SWITCH_SECONDS, LoopWatch
from buckeye.orchestrator.rollout import Group, Rollout
from buckeye.orchestrator.training_samples import Segment
from buckeye.trainer.model.tiny import TinySize, make_tiny_model

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
async def started_server(
    backend: str,
    backlog: int,
    resets: float,
    *,
    tokens: int = NEW_TOKENS,
    delay: float = 0.02,
    arrays: bool = True,
) -> AsyncIterator[Server]:
    """Start the server and stop it at the end. `none` replies with `tokens` tokens, after `delay` seconds.

    With `arrays` false, it replies with JSON, as servers of others do.
    """
    if backend == "none":
        program = str(Path(__file__).with_name("client_server.py"))
        args = (
            sys.executable,
            program,
            str(backlog),
            str(resets),
            str(tokens),
            str(delay),
            *([] if arrays else ["json"]),
        )
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


async def measure_lateness(rollouts: int, server: Server, millions: float) -> None:
    """Keep all rollouts in flight while a batch is written, and print how late the event loop is."""
    prompts = random_prompts(rollouts, MODELS[SIZE]["vocab_size"], seed=0)
    client = InferenceClient([server.url], api_key=server.key, timeout=DEADLINE, model=server.model)
    watch, ends = LoopWatch(), asyncio.Event()

    async def repeat(prompt: Sequence[int], seed: int) -> None:
        while not ends.is_set():
            await rollout(client, prompt, seed, 1)
            await asyncio.sleep(10 + 10 * (seed / rollouts))  # the environment

    with tempfile.TemporaryDirectory() as folder:
        writing = _Writing(Path(folder), millions)
        async with client:
            await client.wait_ready(DEADLINE)
            running = [asyncio.create_task(repeat(p, i)) for i, p in enumerate(prompts)]
            running.append(asyncio.create_task(collect_garbage()))
            await asyncio.sleep(15)
            watch.start()
            watch.take_lateness()
            await asyncio.sleep(15)
            print(f"{rollouts} rollouts   {_late(watch)}", flush=True)
            for name, part in writing.parts.items():
                watch.take_lateness()
                began, cpu = time.monotonic(), time.process_time()
                await part()
                took, spent = time.monotonic() - began, time.process_time() - cpu
                print(f"{name:14} {took:6.2f} s ({spent:6.2f} s cpu) {_late(watch)}", flush=True)
            ends.set()
            watch.stop()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def _late(watch: LoopWatch) -> str:
    late = watch.take_lateness()
    return " ".join(f"{name.rpartition('/')[2]} {1000 * value:.0f} ms" for name, value in late.items())


class _Writing:
    """Steps of the orchestrator from collected groups to a batch on disk."""

    def __init__(self, folder: Path, millions: float) -> None:
        text = "what would a benchmark say if it had a voice and some time to think about words"
        make_tiny_model(folder / "model", texts=[text] * 20, size=TinySize(vocab_size=512), seed=0)
        self._folder, self._config = folder, OrchestratorConfig(output_dir=folder)
        self._renderer = ChatRenderer(folder / "model")
        self._groups = _groups(millions, self._renderer.encode(text))
        self._sender = BatchSender(folder, RunIdentity(run_id="client", attempt=1))
        self.parts = {
            "metrics": self._measure,
            "advantages": self._advantages,
            "rollouts": self._rollouts,
            "batch": self._make,
            "write": self._write,
        }

    async def _measure(self) -> None:
        await asyncio.to_thread(batch_metrics, 0, self._groups, self._config)

    async def _advantages(self) -> None:
        self._values = await asyncio.to_thread(advantages_of, self._groups, self._config)

    async def _rollouts(self) -> None:
        pairs = [(None, group) for group in self._groups]
        await write_rollouts(
            self._folder / "rollouts.jsonl", pairs, self._renderer.decode_in_thread, self._values
        )

    async def _make(self) -> None:
        values = self._groups, self._values, self._config
        self._batch = await asyncio.to_thread(lambda: make_batch(0, *values, state={}))

    async def _write(self) -> None:
        await self._sender.write(self._batch)


def _groups(millions: float, ids: Sequence[int]) -> list[Group]:
    """Return groups of 8 rollouts of 8,192 tokens in 8 turns, 7 of 8 tokens sampled."""
    sampled = np.resize(np.array(ids, np.int32), 896)
    n = len(sampled)
    reply = Generation(
        token_ids=sampled.tolist(), logprobs=[-1.0] * n, versions=[0] * n, finish_reason="stop"
    )

    def finished(number: int) -> Rollout:
        segment = Segment()
        for turn in range(8):
            segment.add_context(sampled[:128])
            segment.add_sampled(reply, turn)
        return Rollout(
            env_name="e",
            task=Task(id="t", messages=()),
            outcome=Outcome(reward=float(number % 3)),
            segments=(segment,),
            truncated=False,
            turns=8,
            seconds=1.0,
            replies=("a",) * 8,
        )

    count = max(1, round(millions * 1e6 / 8192 / 8))
    return [Group(index=i, rollouts=tuple(map(finished, range(8)))) for i in range(count)]


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
    parser.add_argument("--batch", type=float, metavar="MILLIONS", help="write a batch of this size")
    args = parser.parse_args()
    raise_open_files_limit()
    sys.setswitchinterval(SWITCH_SECONDS)
    if args.descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (args.descriptors, args.descriptors))

    async def run() -> None:
        async with started_server(args.backend, args.backlog, args.resets) as server:
            if args.batch is not None:
                await measure_lateness(args.rollouts, server, args.batch)
            else:
                await measure(args.rollouts, args.turns, server)

    asyncio.run(run())


if __name__ == "__main__":
    main()
