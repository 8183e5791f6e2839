"""Measure the cost of a rollout in the orchestrator, from its task to the written batch.

    python benchmarks/orchestrator.py [--rollouts 10 1000 10000] [--rounds 5] [--delay 0] [--tokens 256]
        [--json] [--profile FILE]

A rollout asks twice for 256 tokens, or `--tokens`. `client_server.py`, another process without a model,
replies at once, or after `--delay` seconds; with a delay and few rollouts, the processor sleeps between
replies, and a start from sleep costs time, too. With `--json`, it replies like the servers of others. Real:
the collector, the rollout runner, the chat template, the HTTP client, the advantages, the files of rollouts
and of the batch. Batches have half of the rollouts in flight, and at least 512. Prints for each round the
processor time of the orchestrator per rollout, the rollouts per second that it can finish, and its memory;
then the medians. A round that is not counted loads the code first. Fails if a rollout is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from client import Server, started_server

from buckeye.base.process import RunIdentity, raise_open_files_limit
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.base import Message, Outcome, Policy, Task
from buckeye.inference.client import InferenceClient, SamplingParams
from buckeye.inference.render import ChatRenderer
from buckeye.orchestrator.batch import BatchSender, advantages_of, batch_metrics, make_batch, write_rollouts
from buckeye.orchestrator.collected_groups import CollectedGroups
from buckeye.orchestrator.collector import GroupCollector
from buckeye.orchestrator.coroutines import collect_garbage
from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.loop_watch import SWITCH_SECONDS
from buckeye.orchestrator.pauses import EnvironmentPauses
from buckeye.orchestrator.rollout_runner import RolloutRunner, recording_runner
from buckeye.orchestrator.task_sampler import TaskSampler
from buckeye.trainer.model.tiny import TinySize, make_tiny_model

GROUP = 8
LEAST_BATCH, LEAST_ROLLOUTS = 512, 4000
QUESTION = "what would a benchmark say if it had a voice and some time to think about words"


class TwoTurns:
    """Environment that asks twice."""

    name = "two_turns"

    def __init__(self) -> None:
        self._rollouts = 0

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of training."""
        question = ({"role": "user", "content": QUESTION},)
        return [Task(id=str(i), messages=question) for i in range(1000)] if split == "train" else []

    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        """Ask, and ask again."""
        messages: list[Message] = list(task.messages)
        for _ in range(2):
            reply = await policy.chat(messages)
            messages += [reply.message, {"role": "user", "content": "again"}]
        self._rollouts += 1
        return Outcome(reward=float(self._rollouts % 2))


class Writing:
    """Steps from collected groups to files: metrics, advantages, rollouts and the batch."""

    def __init__(self, folder: Path, config: OrchestratorConfig, renderer: ChatRenderer) -> None:
        self._folder, self.config, self._renderer = folder, config, renderer
        self._sender = BatchSender(folder, RunIdentity(run_id="orchestrator", attempt=1))

    async def write(self, step: int, collected: CollectedGroups) -> None:
        """Write the rollouts and the batch of a step."""
        groups = collected.groups
        await asyncio.to_thread(batch_metrics, step, groups, self.config)
        values = await asyncio.to_thread(advantages_of, groups, self.config)
        path = self._folder / f"rollouts-{step}.jsonl"
        await write_rollouts(
            path, [(None, group) for group in groups], self._renderer.decode_in_thread, values
        )
        batch = await asyncio.to_thread(lambda: make_batch(step, groups, values, self.config, state={}))
        await self._sender.write(batch)


async def measure(server: Server, in_flight: int, tokens: int, profile: cProfile.Profile | None) -> float:
    """Collect and write batches, and print one row. Return the processor time of a rollout in ms."""
    size = max(LEAST_BATCH, in_flight // 2 // GROUP * GROUP)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model", texts=[QUESTION] * 20, size=TinySize(vocab_size=512), seed=0)
        config = OrchestratorConfig(
            output_dir=folder,
            batch_size=size,
            rollouts_per_example=GROUP,
            max_async_level=1,
            seq_len=3 * tokens + 1024,
            max_concurrent=in_flight,
            max_off_policy_steps=1 << 20,  # the server does not know of updates
        )
        renderer = ChatRenderer(folder / "model")
        environment = NamedEnvironment(name=TwoTurns.name, environment=TwoTurns())  # type: ignore[arg-type]
        client = InferenceClient([server.url], api_key=server.key, timeout=600, model=server.model)
        async with client:
            await client.wait_ready(60)
            params = SamplingParams(max_tokens=tokens)
            runner = recording_runner(config, client, renderer, seed=0, params=params)
            pauses = EnvironmentPauses([environment.name], config.env_pause, folder)
            collector = GroupCollector(TaskSampler([environment], seed=0), runner, config, pauses, state={})
            return await _run(runner, collector, Writing(folder, config, renderer), in_flight, profile)


async def _run(
    runner: RolloutRunner,
    collector: GroupCollector,
    writing: Writing,
    in_flight: int,
    profile: cProfile.Profile | None,
) -> float:
    garbage = asyncio.create_task(collect_garbage())
    await asyncio.sleep(0)  # the first collection is of the program's start
    size = writing.config.batch_rollouts
    steps, cpu, began = max(3, LEAST_ROLLOUTS // size), time.process_time(), time.monotonic()
    if profile is not None:
        profile.enable()
    for step in range(steps):
        collected = await collector.collect(step)
        collector.set_version(step + 1)
        await writing.write(step, collected)
    if profile is not None:
        profile.disable()
    cpu, seconds = time.process_time() - cpu, time.monotonic() - began
    finished, unaccounted = runner.attempts, collector.unaccounted
    garbage.cancel()
    await collector.close()
    cells = (
        f"{in_flight:,}",
        f"{1000 * cpu / finished:.2f}",
        f"{finished / seconds:.0f}",
        f"{psutil.Process().memory_info().rss / 2**20:.0f}",
        unaccounted,
    )
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
    if unaccounted:
        raise SystemExit("rollouts were lost")
    return 1000 * cpu / finished


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", nargs="+", type=int, default=[10, 1000, 10000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a reply")
    parser.add_argument("--json", action="store_true", help="replies have JSON instead of arrays")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds until the server replies")
    parser.add_argument("--profile", type=Path, help="write the profile of cProfile to this file")
    args = parser.parse_args()
    raise_open_files_limit()
    sys.setswitchinterval(SWITCH_SECONDS)
    profile = cProfile.Profile(time.process_time) if args.profile is not None else None

    async def run() -> None:
        options = {"tokens": args.tokens, "delay": args.delay, "arrays": not args.json}
        async with started_server("none", 4096, 0.0, **options) as server:
            print("| in flight | ms a rollout | rollouts/s | MiB | unaccounted |")
            print(f"|{'---:|' * 5}")
            await measure(server, LEAST_BATCH, args.tokens, None)
            rounds = [
                [await measure(server, in_flight, args.tokens, profile) for in_flight in args.rollouts]
                for _ in range(args.rounds)
            ]
            medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
            print(*(f"{n:,}: {ms:.2f} ms" for n, ms in zip(args.rollouts, medians, strict=True)), sep=", ")
            print(f"largest to smallest: {max(medians) / min(medians):.2f}")

    asyncio.run(run())
    if profile is not None:
        profile.dump_stats(args.profile)


if __name__ == "__main__":
    main()
