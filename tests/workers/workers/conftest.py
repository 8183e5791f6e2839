"""Environments in workers that misbehave as their tasks say."""

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from buckeye.envs.base import Reply, Task
from buckeye.envs.settings import WorkerSettings
from buckeye.workers.environment import open_worker_environment

ADAPTER = Path(__file__).with_name("rogue.py")


class Says:
    """A policy that always says the same, or cannot answer, and remembers what it was asked."""

    def __init__(self, text="1", *, error=None):
        self.text, self.error, self.asked = text, error, []

    async def chat(self, messages, *, tools=()):
        self.asked.append([dict(message) for message in messages])
        if self.error is not None:
            raise self.error
        message = {"role": "assistant", "content": self.text}
        return Reply(text=self.text, finish_reason="stop", message=message)


def rogue(name, number=0):
    """A task of the environment in rogue.py."""
    task_id = f"{name}#{number}" if number else name
    return Task(id=task_id, messages=({"role": "user", "content": f"do {name}"},), data={"name": name})


def play(environment, *names, policy=None):
    """The outcomes of rollouts that are played at the same time."""

    async def all_of_them():
        policies = policy or Says()
        return await asyncio.gather(*(environment.rollout(rogue(name), policies) for name in names))

    return asyncio.run(all_of_them())


def is_gone(pid):
    """Whether a process has ended. Whoever has adopted it may take its time to notice."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def opened():
    """`opened(args, **settings)` loads an environment; all are closed at the end of the module."""
    environments = []

    def open_it(args=None, **settings):
        settings = WorkerSettings(adapter=ADAPTER, **settings)
        environment = open_worker_environment("rogue", args or {}, Path(sys.executable), settings)
        environments.append(environment)
        return environment

    yield open_it
    for environment in environments:
        asyncio.run(environment.close())


@pytest.fixture(scope="module")
def environment(opened):
    """One for all tests of a module that do not harm its worker."""
    return opened()
