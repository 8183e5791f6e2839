"""Workers that other processes start, as on other nodes of a run."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.ports import free_port
from tests.waiting import wait_for
from tests.workers.workers.conftest import ADAPTER, Says, is_gone, play, rogue

from buckeye.config.environments import TrainEnvConfig
from buckeye.envs.settings import PLACEMENT_VARIABLE, WorkerSettings, read_placement
from buckeye.errors import UsageError
from buckeye.launch.plan import PlanNode
from buckeye.launch.preflight.devices import Machine
from buckeye.launch.worker_hosts import worker_hosts
from buckeye.workers.environment import open_worker_environment
from buckeye.workers.process_start import WORKERS_KEY
from buckeye.workers.worker_side.frames import encode

pytestmark = pytest.mark.e2e

HERE = "127.0.0.1"


class Host:
    """Host of workers, in its own process."""

    def __init__(self, folder, key="of the run"):
        self.port, self.log = free_port(), folder / "workers.stdout"
        words = ("--host", HERE, "--port", str(self.port))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "buckeye.cli.worker_host", *words],
            env={**os.environ, WORKERS_KEY: key},
            stdout=self.log.open("ab"),
            stderr=subprocess.STDOUT,
        )

    @property
    def place(self):
        return HERE, self.port

    def workers(self):
        return [
            child
            for child in psutil.Process(self.process.pid).children()
            if any(word.endswith("worker_side/main.py") for word in child.cmdline())
        ]

    def end(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setenv(WORKERS_KEY, "of the run")
    hosts = []

    def start(**words):
        hosts.append(Host(tmp_path, **words))
        return hosts[-1]

    yield start
    for one in hosts:
        one.end()


@pytest.fixture
def opened(tmp_path):
    environments = []

    def open_it(*hosts, args=None, **settings):
        settings = WorkerSettings(
            adapter=ADAPTER,
            nodes=tuple(None if one is None else one.place for one in hosts),
            processes=len(hosts),
            log_dir=tmp_path / "logs",
            **settings,
        )
        environments.append(open_worker_environment("rogue", args or {}, Path(sys.executable), settings))
        return environments[-1]

    yield open_it
    for environment in environments:
        asyncio.run(environment.close())


def test_remote_worker_behaves_like_a_local_one(host, opened, tmp_path):
    there = host()
    environment = opened(there)
    policy = Says("7")
    (outcome,) = play(environment, "asks", policy=policy)
    assert outcome.error is None
    assert len(policy.asked) == 1
    (worker,) = there.workers()
    assert environment.tasks("train")[0].id == "good"
    (raised,) = play(environment, "raises")
    assert (raised.boundary, raised.reward) == ("step", None)
    log = tmp_path / "logs" / "environment.stdout"
    wait_for(lambda: log.exists() and "Traceback" in log.read_text(), "its output in the local log")
    with pytest.raises(UsageError, match="I was going to load"):
        opened(there, args={"load": "raises"})
    worker.kill()
    wait_for(lambda: environment.workers() == [], "its end is noticed")
    assert play(environment, "good")[0].error is None
    (worker,) = there.workers()
    asyncio.run(environment.close())
    wait_for(lambda: is_gone(worker.pid), "it has ended")


def test_remote_worker_killed_during_load_is_replaced(host, opened, tmp_path):
    environment = opened(host(), args={"load": "killed", "marker": str(tmp_path / "marker")})
    assert (tmp_path / "marker").exists()
    assert play(environment, "good")[0].error is None


@pytest.mark.slow
def test_workers_of_a_lost_node_start_on_another(host, opened):
    first, second = host(), host()
    environment = opened(first, second)
    assert [outcome.error for outcome in play(environment, *["good"] * 8)] == [None] * 8
    assert (len(first.workers()), len(second.workers())) == (1, 1)

    async def lose():
        playing = [asyncio.create_task(environment.rollout(rogue("waits", n), Says())) for n in range(2)]
        await asyncio.sleep(1)
        os.kill(first.process.pid, signal.SIGKILL)
        done, rest = await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        return [task.result() for task in done]

    (outcome,) = asyncio.run(lose())
    assert outcome.boundary == "worker"
    assert [outcome.error for outcome in play(environment, *["good"] * 8)] == [None] * 8
    wait_for(lambda: len(second.workers()) == 2, "a worker on the other node")


@pytest.mark.slow
def test_worker_host_refuses_clients_without_the_key(host, opened):
    there = host(key="another")
    with pytest.raises(Exception, match="node"):
        opened(there, max_failures=1)
    assert there.workers() == []

    async def say(data):
        reader, writer = await asyncio.open_connection(*there.place)
        writer.write(data)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer

    for data in (b"", b"\xff" * 64, encode({"type": "start"}), b"\0\0\0\5[1,2]", b"GET / HTTP/1.1\r\n\r\n"):
        assert asyncio.run(say(data)) == b""
    assert there.process.poll() is None
    assert "Traceback" not in there.log.read_text()


@pytest.mark.slow
def test_remote_worker_beyond_its_memory_limit_is_killed(host, opened):
    environment = opened(host(), max_memory_bytes=200 << 20)
    (outcome,) = play(environment, "hoards")
    assert outcome.boundary == "worker"
    assert "max_memory_gb allows" in outcome.error


def site(number):
    return PlanNode(
        name=f"node {number}",
        machine=Machine(cores=1, gpus=()),
        choose_ports=lambda count: [30_000 + number] * count,
        address=f"10.0.0.{number}",
    )


def test_environments_have_hosts_of_workers_on_their_nodes(monkeypatch):
    one = TrainEnvConfig(id="letters.py", placement=[0, 2])
    two = TrainEnvConfig(id="numbers.py", placement=[2], name="two")
    hosts = worker_hosts([one, two], plan_nodes={1: site(1), 2: site(2)}, address="10.0.0.9")
    (role,) = hosts.roles
    assert (role.kind, role.node, role.url) == ("workers", 2, "http://10.0.0.2:30002")
    assert role.env == {WORKERS_KEY: hosts.env[WORKERS_KEY]}
    assert not any(hosts.env[WORKERS_KEY] in word for word in role.argv)
    monkeypatch.setenv(PLACEMENT_VARIABLE, hosts.env[PLACEMENT_VARIABLE])
    assert read_placement("letters") == {"nodes": [None, ["10.0.0.2", 30002]], "address": "10.0.0.9"}
    assert read_placement("two")["nodes"] == [["10.0.0.2", 30002]]
    assert read_placement("other") == {}
    with pytest.raises(UsageError, match="excludes isolation"):
        worker_hosts(
            [one.model_copy(update={"isolation": "none"})], plan_nodes={2: site(2)}, address="10.0.0.9"
        )
