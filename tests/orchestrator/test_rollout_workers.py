"""Rollouts in worker processes: the same ones as in one process, and none lost when a worker is killed."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from buckeye.config.environments import EnvPauseConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.base import Outcome, Task
from buckeye.errors import ConfigError, FinalRunError, RunError
from buckeye.inference.client import InferenceClient, SamplingParams
from buckeye.orchestrator import rollout_workers
from buckeye.orchestrator.collector import GroupCollector
from buckeye.orchestrator.pauses import EnvironmentPauses
from buckeye.orchestrator.rollout import Rollout
from buckeye.orchestrator.rollout_runner import recording_runner
from buckeye.orchestrator.rollout_workers import RolloutWorkers, shared_environments
from buckeye.orchestrator.task_sampler import TaskSampler
from buckeye.orchestrator.worker_messages import Finished, decode, encode
from buckeye.workers.worker_side.frames import HEADER
from tests.waiting import HANG, wait_for

from .fakes import LetterRenderer
from .scripted_worker import environments

pytestmark = pytest.mark.anyio
PROGRAM = ("-m", "tests.orchestrator.scripted_worker")


class ScriptedServer:
    """Inference server whose replies depend on the seed only. `most` is the largest number at a time."""

    def __init__(self, max_num_seqs=None):
        self.running = self.most = self.version = 0
        self.seconds = 0.01
        self._workers = [{"process": "1", "max_num_seqs": max_num_seqs}]

    @contextlib.asynccontextmanager
    async def serving(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _serve(self, reader, writer):
        ends = (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError)
        with contextlib.suppress(*ends):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                body = await reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
                reply = json.dumps(await self._answer(head.split()[1], json.loads(body or "{}"))).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(reply), reply))
        writer.close()

    async def _answer(self, route, body):
        if route != "/inference/v1/generate":
            models = {"data": [{"id": "m", "owned_by": "buckeye"}]}
            return {"/v1/models": models, "/collective_rpc": {"results": self._workers}}.get(route, {})
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        rng = random.Random(body["sampling_params"]["seed"])
        ids = [ord(rng.choice("abcd")) for _ in range(3)] + [ord("$")]
        return {
            "choices": [
                {
                    "token_ids": ids,
                    "logprobs": {"content": [{"logprob": -0.5 - i / 7} for i in range(4)]},
                    "finish_reason": "stop",
                    "weight_versions": [{"version": str(self.version), "start": 0, "end": 4}],
                }
            ]
        }


@contextlib.asynccontextmanager
async def collecting(server, workers, *, program=PROGRAM, **changes):
    """Yield a collector, its workers (None: this process), and the client."""
    options = {"batch_size": 32, "rollouts_per_example": 4, "max_rollout_retries": 1, "seq_len": 500}
    config = OrchestratorConfig(client={"base_url": [server.url]}, workers=workers, **(options | changes))
    version = 0
    async with contextlib.AsyncExitStack() as stack:
        client = InferenceClient([server.url], api_key=None, timeout=HANG, model="m")
        await stack.enter_async_context(client)
        await client.wait_ready(HANG)
        if workers == 1:
            params = SamplingParams(max_tokens=8)
            runner = recording_runner(config, client, LetterRenderer(), seed=5, params=params)
        else:
            runner = RolloutWorkers(config, client, seed=5, version=lambda: version, program=program)
            await stack.enter_async_context(runner)
        sampler = TaskSampler(environments(), seed=config.seed)
        pauses = EnvironmentPauses(["letters"], EnvPauseConfig(after_failures=99), Path("run"))
        collector = GroupCollector(sampler, runner, config, pauses, state={})
        running = [] if workers == 1 else [asyncio.create_task(runner.run())]
        try:
            yield collector, runner, client
        finally:
            await collector.close()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def facts(collected):
    """Return what training uses of each rollout."""
    return {
        (group.index, member): (
            rollout.task,
            rollout.reward,
            rollout.replies,
            [
                (s.token_ids.tolist(), s.logprobs.tolist(), s.versions.tolist(), s.turns.tolist())
                for s in rollout.segments
            ],
        )
        for group in collected.groups
        for member, rollout in enumerate(group.rollouts)
    }


async def test_two_workers_run_the_same_rollouts_as_one_process():
    found = {}
    for workers in (1, 2):
        async with (
            ScriptedServer(max_num_seqs=8).serving() as server,
            collecting(server, workers, batch_size=64, max_async_level=0, deterministic=False) as parts,
        ):
            collector, runner, client = parts
            collected = await collector.collect(0)
            found[workers] = facts(collected)
            assert server.most <= 10  # a quarter more than it decodes, from both workers together
            assert collector.unaccounted == 0
            if workers == 2:
                children = [psutil.Process(pid) for pid in runner.pids()]
                await asyncio.sleep(0.3)  # until the next counts
                metrics = runner.metrics() | client.metrics()
                assert metrics["inference/0/requests"] == 128
                assert metrics["inference/0/tokens"] == 512
                assert metrics["inference/0/tokens_in_flight"] == 0
                assert 0 <= metrics["time/workers_late/p50"] <= metrics["time/workers_late/max"]
                assert collected.groups[0].rollouts[0].messages[-1]["content"] == "\ufffd"
    assert len(found[1]) == 64
    assert found[1] == found[2]
    assert not any(child.is_running() for child in children)


async def test_a_killed_worker_loses_no_rollout():
    async with (
        ScriptedServer().serving() as server,
        collecting(server, 2, max_rollout_retries=0) as (collector, runner, _),
    ):
        server.seconds = 0.2
        collecting_first = asyncio.create_task(collector.collect(0))
        while not server.running:
            await asyncio.sleep(0.01)
        killed = runner.pids()[0]
        os.kill(killed, signal.SIGKILL)
        batches = [await collecting_first]
        batches += [await collector.collect(step) for step in (1,)]
        metrics, rollouts = runner.metrics(), [r for batch in batches for r in batch.rollouts]
        assert metrics["workers/restarts"] == 1
        assert killed not in runner.pids()
        retried = [rollout for rollout in rollouts if rollout.earlier_attempts]
        assert len(retried) == metrics["workers/lost_rollouts"] > 0
        assert {r.earlier_attempts[0].outcome.boundary for r in retried} == {"worker"}
        assert "killed by signal 9" in retried[0].earlier_attempts[0].outcome.error
        assert all(rollout.reward is not None for rollout in rollouts)
        assert collector.unaccounted == 0


async def test_rollouts_that_lose_too_many_workers_are_errored(monkeypatch):
    monkeypatch.setattr(rollout_workers, "_MAX_LOSSES", 1)
    async with ScriptedServer().serving() as server, collecting(server, 2) as (collector, runner, _):
        server.seconds = 0.2
        running = asyncio.create_task(collector.collect(0))
        while not server.running:
            await asyncio.sleep(0.01)
        os.kill(runner.pids()[1], signal.SIGKILL)
        collected = await running
        assert collected.dropped["errored"] == runner.metrics()["workers/lost_rollouts"] / 4 > 0
        assert collected.account()["trained"] == 32
        assert collector.unaccounted == 0


async def test_groups_that_start_while_all_workers_are_replaced_end(monkeypatch):
    connect = asyncio.open_connection

    async def connect_late(**options):
        await asyncio.sleep(0.3)
        return await connect(**options)

    async with ScriptedServer().serving() as server, collecting(server, 2) as (_, runner, _):
        monkeypatch.setattr(asyncio, "open_connection", connect_late)
        for pid in runner.pids():
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        sampler = TaskSampler(environments(), seed=OrchestratorConfig().seed)
        running = [runner.start_group(sampler[index], 4) for index in range(4)]
        async with asyncio.timeout(HANG):
            groups = await asyncio.gather(*running)
        assert [len(group.scored) for group in groups] == [4] * 4


async def test_a_worker_that_cannot_be_replaced_ends_the_run(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no memory")

    async with ScriptedServer().serving() as server, collecting(server, 2) as (_, runner, _):
        monkeypatch.setattr(rollout_workers, "ChildProcess", refuse)
        os.kill(runner.pids()[0], signal.SIGKILL)
        with pytest.raises(OSError, match="no memory"):
            async with asyncio.timeout(HANG):
                await runner.run()


@pytest.mark.parametrize(
    ("program", "kind", "code"),
    [
        (("-c", "import sys; sys.exit(3)"), RunError, "BK-ROLLOUT-WORKER"),
        (("-m", "buckeye.cli.rollout_worker"), FinalRunError, "BK-CONFIG-MISSING"),  # no environment is set
    ],
)
async def test_a_worker_that_cannot_start_ends_the_run(monkeypatch, tmp_path, program, kind, code):
    monkeypatch.setattr(rollout_workers, "_MAX_RESTARTS", 1)
    async with (
        ScriptedServer().serving() as server,
        collecting(server, 2, program=program, output_dir=tmp_path) as (_, runner, _),
    ):
        with pytest.raises(kind) as raised:
            await runner.run()
        assert raised.value.code == code


def test_processes_share_the_limits_of_environments():
    limits = {"max_concurrent": 8, "rate_limit": 6.0, "workers": 3}
    config = OrchestratorConfig(workers=2, eval={}, env=[{"id": "e", **limits}], rollouts_per_example=8)
    shares = [shared_environments(config, index)[0] for index in range(3)]
    assert [share.max_concurrent for share in shares] == [2, 3, 3]
    assert [share.rate_limit for share in shares] == [2.0] * 3
    assert [share.workers for share in shares[:2]] == [1, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_concurrent": 2},
        {"env": [{"id": "e", "max_concurrent": 2}]},
        {"max_async_level": 0},
        {"batch_size": 8, "max_async_level": 1, "workers": 17},
    ],
)
def test_limits_that_processes_cannot_share_are_refused(changes):
    with pytest.raises((ConfigError, ValueError), match=r"workers|processes"):
        OrchestratorConfig(**{"workers": 3, "rollouts_per_example": 8} | changes)


@pytest.mark.parametrize(("content", "problem"), [("x" * (65 << 20), "bytes"), ([[]] * 2, "nested")])
def test_a_rollout_that_cannot_be_sent_is_errored(content, problem):
    if isinstance(content, list):
        content.append(content)
    rollout = Rollout(
        env_name="e",
        task=Task(id="", messages=()),
        outcome=Outcome(reward=1.0),
        segments=(),
        truncated=False,
        turns=1,
        seconds=1.0,
        messages=({"role": "tool", "content": content},),
    )
    received = decode(encode(Finished(3, rollout))[HEADER.size :])
    assert (received.number, received.rollout.outcome.boundary, received.rollout.reward) == (3, "step", None)
    assert problem in received.rollout.outcome.error


HOLDER = """
import asyncio
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.inference.client import InferenceClient
from buckeye.orchestrator.rollout_workers import RolloutWorkers

async def hold():
    config = OrchestratorConfig(workers=2, rollouts_per_example=8)
    client = InferenceClient(["http://127.0.0.1:1"], api_key=None, timeout=1, model="m")
    program = ("-m", "tests.orchestrator.scripted_worker")
    async with RolloutWorkers(config, client, seed=0, version=lambda: 0, program=program) as workers:
        print(*workers.pids(), flush=True)
        await asyncio.sleep(600)

asyncio.run(hold())
"""


def test_workers_end_with_a_killed_orchestrator():
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        workers = [psutil.Process(int(pid)) for pid in holder.stdout.readline().split()]
        assert len(workers) == 2
        holder.kill()
    wait_for(
        lambda: not any(w.is_running() and w.status() != "zombie" for w in workers), "the end of workers"
    )
