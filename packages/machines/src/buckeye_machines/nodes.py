"""The hosts of a run beside the first: made ready as that one is, and kept as nodes of the run."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from buckeye.cluster.key import KEY_VARIABLE
from buckeye.config.rl import ClusterConfig
from buckeye.errors import BuckeyeError, RemoteError, UsageError
from buckeye_machines import job as jobs
from buckeye_machines.bootstrap import bootstrap
from buckeye_machines.connection import Link, LostConnectionError

T = TypeVar("T")

_CONNECT_SECONDS = 600.0
_LOOK_SECONDS = 5.0
_LAST_SECONDS = 20.0
_AT_ONCE_SECONDS, _MOST_AT_ONCE = 60.0, 3


def check_hosts(config: ClusterConfig, hosts: int, *, rented: bool) -> None:
    """Raise UsageError unless a run has as many nodes as there are hosts; one that names no number has."""
    if rented and hosts != 1:
        raise UsageError(f"The pod has {hosts} nodes: on rented machines this version trains on one.")
    if config.nodes not in (1, hosts):
        raise UsageError(
            f"cluster.nodes = {config.nodes}, and --host names {hosts}: name a host for each node."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """Where the first host awaits the others."""

    address: str
    port: int


class OtherNodes:
    """Hosts 1 and so on of a run. Their key is made here and never written down but on the way into their
    processes."""

    def __init__(
        self, links: Sequence[Link], config: ClusterConfig, run_id: str, tell: Callable[[str], None]
    ) -> None:
        self._links, self._config, self._run_id, self._tell = links, config, run_id, tell
        self._key = secrets.token_urlsafe(32)
        self._pythons: list[str] = []
        self._keeping: list[asyncio.Task[None]] = []
        self._jobs: dict[int, jobs.Job] = {}

    async def prepare(self) -> None:
        """Have all of them connected, and with this version of Buckeye."""
        for link in self._links:
            self._tell(f"Connecting to {link.target} ...")
            await link.connect(patience=_CONNECT_SECONDS)
            self._pythons.append((await bootstrap(link, tell=self._tell)).python)

    async def head_words(self, first: Link, python: str) -> list[str]:
        """What `rl` on the first host is told beside the run's own words."""
        if not self._links:
            return []
        address = self._config.address or await self._address(first, python)
        self._head = _Head(address=address, port=self._config.port)
        return [
            *("--cluster.nodes", str(len(self._links) + 1)),
            *("--cluster.address", address, "--cluster.port", str(self._config.port)),
        ]

    @property
    def head_secrets(self) -> dict[str, str]:
        """What it is told in secret."""
        return {KEY_VARIABLE: self._key} if self._links else {}

    def start(self) -> None:
        """Make the hosts nodes of the run, and keep them so until `close`: one that is lost is started again
        when it is back."""
        pairs = zip(self._links, self._pythons, strict=True)
        self._keeping = [
            asyncio.create_task(self._keep(number, link, python))
            for number, (link, python) in enumerate(pairs, 1)
        ]

    async def close(self) -> None:
        """Leave nothing behind there."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        for number, link in enumerate(self._links, 1):
            job = self._jobs.get(number)
            if job is not None:
                with suppress(BuckeyeError, OSError, TimeoutError):
                    async with asyncio.timeout(_LAST_SECONDS):
                        await jobs.forget_secrets(link, job)
                        await self._stop(link, job)
            await link.close()

    async def _address(self, first: Link, python: str) -> str:
        """The address of the first host that reaches the second."""
        other = self._links[0].target.host
        found = await first.run([python, "-m", "buckeye.cluster.address", other])
        if found.code != 0:
            raise RemoteError(
                f"{first.target} does not know how to reach {other} ({found.text()}). Name its address for "
                "the other hosts in the configuration: cluster.address."
            )
        return found.stdout.decode().strip()

    async def _keep(self, number: int, link: Link, python: str) -> None:
        """Until the node has ended in good order, or can be none. The run's head then says what it lacks."""
        at_once = 0
        for start in itertools.count(1):
            begun = time.monotonic()
            try:
                job, code = await self._once(number, start, link, python)
            except BuckeyeError as error:
                self._tell(f"error: node {number} on {link.target}: {error}")
                return
            if code == 0:
                return
            at_once = at_once + 1 if time.monotonic() - begun < _AT_ONCE_SECONDS else 0
            ended = f"Node {number} on {link.target} has ended ({job.folder}/log there says why)"
            if at_once == _MOST_AT_ONCE:
                self._tell(f"error: {ended}, {at_once} times at once: it is not started again")
                return
            self._tell(f"{ended}: it is started again")
            await asyncio.sleep(_LOOK_SECONDS)

    async def _once(self, number: int, start: int, link: Link, python: str) -> tuple[jobs.Job, int | None]:
        """Have the node started, and wait for its end."""
        run_id = f"{self._run_id}-node{number}-{start}"
        folder = f"{await self._home(link)}/.buckeye/jobs/{run_id}"
        job = self._jobs[number] = jobs.Job(run_id=run_id, folder=folder, python=python)
        await self._through_cuts(link, partial(self._begin, link, job, number))
        return job, await self._until_end(link, job)

    async def _home(self, link: Link) -> str:
        return await self._through_cuts(link, partial(jobs.home_of, link))

    async def _through_cuts(self, link: Link, call: Callable[[], Awaitable[T]]) -> T:
        """Call again until it goes through."""
        while True:
            try:
                await link.connect(patience=_CONNECT_SECONDS)
                return await call()
            except LostConnectionError as error:
                self._tell(f"warning: {error}")
                await asyncio.sleep(_LOOK_SECONDS)

    async def _begin(self, link: Link, job: jobs.Job, number: int) -> None:
        settings: dict[str, object] = {
            "argv": [
                *(job.python, "-m", "buckeye", "node", "--head", f"{self._head.address}:{self._head.port}"),
                *("--number", str(number), "--name", link.target.host),
            ],
            "cwd": job.folder,
            "output_dir": job.folder,
            "env": {},
            "dead_man": None,
        }
        await jobs.prepare(link, job, settings)
        await jobs.start(link, job, self.head_secrets)

    async def _until_end(self, link: Link, job: jobs.Job) -> int | None:
        """The exit code of a job; None if its host was switched off meanwhile."""
        lost = False
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await link.connect(patience=_CONNECT_SECONDS)
                async with jobs.questions(link, job) as asked:
                    look, _ = await asked.ask("look")
            except LostConnectionError as error:
                if not lost:
                    self._tell(f"warning: {error}")
                lost = True
                continue
            lost = False
            if look["started"] and not look["running"]:
                return look["code"] if isinstance(look["code"], int) else None

    async def _stop(self, link: Link, job: jobs.Job) -> None:
        async with jobs.questions(link, job) as asked:
            await asked.ask("stop")
            await asked.ask("stop")  # the first one asks the run, which is over
