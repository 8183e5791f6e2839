"""The hosts that ssh reaches as a Ray cluster: what happens when one cannot be part of it."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from buckeye.config.rl import ClusterConfig
from buckeye.errors import RemoteError
from buckeye_machines.engines import ray_over_ssh


class FakeLink:
    """A host that answers, and does nothing."""

    target = SimpleNamespace(host="10.0.0.2")

    async def connect(self, patience):
        pass

    async def close(self):
        pass

    async def run(self, words):
        assert words[-2:] == ["10.0.0.2", "10.0.0.1"]
        return SimpleNamespace(code=0, stdout=b"10.0.0.1 23456\n")


@pytest.fixture
def host(monkeypatch):
    """Where jobs begin, and end at once with exit code 1."""
    begun = []

    async def bootstrap(link, *, tell, extras):
        assert "ray" in extras
        return SimpleNamespace(python="python")

    async def home(link):
        return "/root"

    async def prepare(link, job, settings):
        begun.append((job.run_id, settings["argv"]))

    async def nothing(*_):
        pass

    @asynccontextmanager
    async def questions(link, job):
        async def ask(word):
            return {"started": True, "running": False, "code": 1}, b""

        yield SimpleNamespace(ask=ask)

    monkeypatch.setattr(ray_over_ssh, "bootstrap", bootstrap)
    monkeypatch.setattr(ray_over_ssh, "_LOOK_SECONDS", 0.01)
    for name, fake in (("home_of", home), ("prepare", prepare), ("start", nothing)):
        monkeypatch.setattr(ray_over_ssh.jobs, name, fake)
    monkeypatch.setattr(ray_over_ssh.jobs, "forget_secrets", nothing)
    monkeypatch.setattr(ray_over_ssh.jobs, "questions", questions)
    return begun


def kept_until(words):
    """What was said, up to the first line with these words."""
    told = []

    async def keep():
        config = ClusterConfig(address="10.0.0.1")
        hosts = ray_over_ssh.RayOverSsh([FakeLink(), FakeLink()], config, "ab12", told.append)
        await hosts.prepare("python")
        argv = await hosts.command(["python", "-m", "buckeye", "rl"])
        assert argv[1:5] == ["-m", "buckeye_machines.engines.ray_cluster", "10.0.0.1", "23456"]
        assert argv[5:9] == ["python", "-m", "buckeye", "rl"]
        assert argv[9:11] == ["--cluster.nodes", "2"]
        assert hosts.secrets["RAY_AUTH_MODE"] == "token"
        assert hosts.secrets["RAY_AUTH_TOKEN"] not in argv
        hosts.start()
        async with asyncio.timeout(30):
            while not any(words in line for line in told):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # in which nothing more may happen
        await hosts.close()

    asyncio.run(keep())
    return told


def test_ray_that_ends_at_once_is_not_started_for_ever(host):
    told = kept_until("it is not started again")
    assert [run_id for run_id, _ in host] == ["ab12-ray1-1", "ab12-ray1-2", "ab12-ray1-3"]
    assert host[0][1][-2:] == ["--address", "10.0.0.1:23456"]
    assert "/root/.buckeye/jobs/ab12-ray1-3/log there says why" in told[-1]


def test_what_keeps_a_host_from_being_part_of_it_is_said(host, monkeypatch):
    async def full(link, job, settings):
        raise RemoteError("No space left on device")

    monkeypatch.setattr(ray_over_ssh.jobs, "prepare", full)
    told = kept_until("No space left on device")
    assert host == []
    assert told[-1].startswith("error: Ray on ")
