"""Fixtures of remote runs: `buckeye rl` as a function, a model, and rentable machines."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from buckeye.remote.bootstrap import bootstrap
from buckeye.remote.connection import SshConnection
from tests.command import run_here
from tests.remote.house import House
from tests.remote.laptop import STARTED
from tests.remote.sshd import sshd
from tests.remote.town import Town
from tests.run.conftest import tiny_model as model

__all__ = ["model"]


@pytest.fixture
def run_rl():
    """Return a function that runs `rl WORDS` in this process; it returns exit code, stdout and stderr."""

    def carry_out(*words):
        done = run_here(*words, cwd=".", program="rl")
        return done.returncode, done.stdout, done.stderr

    return carry_out


@pytest.fixture
def house(tmp_path, monkeypatch) -> House:
    numbers = itertools.count(1)
    named = SimpleNamespace(token_hex=lambda _: f"{next(numbers):04x}")
    monkeypatch.setattr("buckeye.remote.rental.secrets", named)
    return House(tmp_path, monkeypatch)


@pytest.fixture
def nothing_goes_on():
    """Kill the processes that a test leaves running."""
    yield
    while STARTED:
        running = STARTED.pop()
        if running.poll() is None:
            running.kill()
            running.wait()


@pytest.fixture(scope="session")
def software(tmp_path_factory):
    """Software installed once and shared by all machines, which cannot reach a package index."""

    async def make(host):
        link = SshConnection(
            host.target,
            known_hosts=host.folder / "known",
            identity_file=host.key,
            own_settings=False,
            tell=lambda _: None,
        )
        try:
            await bootstrap(link, tell=lambda _: None)
        finally:
            link.close()

    with sshd(tmp_path_factory.mktemp("software")) as host:
        asyncio.run(make(host))


@pytest.fixture
def town(tmp_path, software):
    """Fake provider with its machines."""
    with Town(tmp_path / "town") as made:
        yield made
