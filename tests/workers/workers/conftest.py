"""Environments in workers that misbehave as their tasks request."""

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
    """Policy that always gives the same reply or raises an error, and records its requests."""

    def __init__(self, text="1", *, error=None):
        self.text, self.error, self.asked = text, error, []

    async def chat(self, messages, *, tools=()):
        self.asked.append([dict(message) for message in messages])
        if self.error is not None:
            raise self.error
        message = {"role": "assistant", "content": self.text}
        return Reply(text=self.text, finish_reason="stop", message=message)


def rogue(name, number=0):
    """Return a task of the environment in rogue.py."""
    task_id = f"{name}#{number}" if number else name
    return Task(id=task_id, messages=({"role": "user", "content": f"do {name}"},), data={"name": name})


def play(environment, *names, policy=None):
    """Return the outcomes of concurrent rollouts."""

    async def all_of_them():
        policies = policy or Says()
        return await asyncio.gather(*(environment.rollout(rogue(name), policies) for name in names))

    return asyncio.run(all_of_them())


def is_gone(pid):
    """Return True if a process has ended, also if its parent has not yet collected the exit status."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def opened():
    """Return `opened(args, **settings)`, which loads an environment; all are closed after the module."""
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
    """Environment shared by the module's tests that do not harm its worker."""
    return opened()
