"""Several hosts that are reached by ssh: made ready as one is, and kept as a Ray cluster for the run."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from buckeye.config.rl import ClusterConfig
from buckeye.errors import BuckeyeError, RemoteError, UsageError
from buckeye_machines import job as jobs
from buckeye_machines.bootstrap import EXTRAS, bootstrap
from buckeye_machines.connection import Link, LostConnectionError

T = TypeVar("T")

_CONNECT_SECONDS = 600.0
_LOOK_SECONDS = 5.0
_LAST_SECONDS = 20.0
_AT_ONCE_SECONDS, _MOST_AT_ONCE = 60.0, 3
_PLACE = """
import sys
from buckeye.sizing.ports import Ports, address_towards
print(sys.argv[2] or address_towards(sys.argv[1]), *Ports().choose(1))
"""


def check_hosts(config: ClusterConfig, hosts: int, *, rented: bool) -> None:
    """Raise UsageError unless a run has as many nodes as there are hosts; one that names no number has."""
    if rented and hosts != 1:
        raise UsageError(f"The pod has {hosts} nodes: on rented machines this version trains on one.")
    if config.nodes not in (1, hosts):
        raise UsageError(
            f"cluster.nodes = {config.nodes}, and --host names {hosts}: name a host for each node."
        )


class RayOverSsh:
    """The hosts of a run as a Ray cluster, whose head is the first. Its token is made here and never written
    down but on the way into its processes. One host alone needs none."""

    def __init__(
        self, links: Sequence[Link], config: ClusterConfig, run_id: str, tell: Callable[[str], None]
    ) -> None:
        self._links, self._config, self._run_id, self._tell = links, config, run_id, tell
        self._token = secrets.token_hex(32)
        self._head = ""
        self._pythons: list[str] = []
        self._keeping: list[asyncio.Task[None]] = []
        self._jobs: dict[int, jobs.Job] = {}

    @property
    def extras(self) -> tuple[str, ...]:
        """The extras of Buckeye that every host needs."""
        return (*EXTRAS, "ray") if len(self._links) > 1 else EXTRAS

    async def prepare(self, python: str) -> None:
        """Have all hosts connected, and with this version of Buckeye; the first one has it in `python`."""
        self._pythons = [python]
        for link in self._links[1:]:
            self._tell(f"Connecting to {link.target} ...")
            await link.connect(patience=_CONNECT_SECONDS)
            self._pythons.append((await bootstrap(link, tell=self._tell, extras=self.extras)).python)

    async def command(self, words: Sequence[str]) -> list[str]:
        """How `words`, which start a run on one host, start it on all: the first is the cluster's head for as
        long as the run goes on."""
        if len(self._links) == 1:
            return list(words)
        address, port = await self._find_place()
        self._head = f"{address}:{port}"
        return [
            *(self._pythons[0], "-m", "buckeye_machines.engines.ray_cluster", address, port),
            *(*words, "--cluster.nodes", str(len(self._links)), "--cluster.engine", "ray"),
            *("--cluster.address", address, "--cluster.ray-address", self._head),
        ]

    @property
    def secrets(self) -> dict[str, str]:
        """What it is told in secret."""
        if len(self._links) == 1:
            return {}
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token}

    def start(self) -> None:
        """Make the hosts beside the first part of the cluster, and keep them so until `close`: one that is
        lost is started again when it is back."""
        pairs = list(zip(self._links, self._pythons, strict=True))[1:]
        if pairs:
            self._tell(f"Starting Ray on {len(self._links)} hosts; it ends with the run.")
        self._keeping = [
            asyncio.create_task(self._keep(number, link, python))
            for number, (link, python) in enumerate(pairs, 1)
        ]

    async def close(self) -> None:
        """Leave nothing behind there."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        for number, link in enumerate(self._links[1:], 1):
            job = self._jobs.get(number)
            if job is not None:
                with suppress(BuckeyeError, OSError, TimeoutError):
                    async with asyncio.timeout(_LAST_SECONDS):
                        await jobs.forget_secrets(link, job)
                        await self._stop(link, job)
            await link.close()

    async def _find_place(self) -> tuple[str, str]:
        """The address of the first host that reaches the second, and a free port there."""
        first, other = self._links[0], self._links[1].target.host
        found = await first.run([self._pythons[0], "-c", _PLACE, other, self._config.address or ""])
        words = found.stdout.decode(errors="replace").split()
        if found.code != 0 or len(words) != 2 or not words[1].isdigit():
            raise RemoteError(
                f"{first.target} does not know how to reach {other} ({found.text()}). Name its address for "
                "the other hosts in the configuration: cluster.address."
            )
        return words[0], words[1]

    async def _keep(self, number: int, link: Link, python: str) -> None:
        """Until Ray has ended in good order, or cannot run there. The run then says what it lacks."""
        at_once = 0
        for start in itertools.count(1):
            begun = time.monotonic()
            try:
                job, code = await self._once(number, start, link, python)
            except BuckeyeError as error:
                self._tell(f"error: Ray on {link.target}: {error}")
                return
            if code == 0:
                return
            at_once = at_once + 1 if time.monotonic() - begun < _AT_ONCE_SECONDS else 0
            ended = f"Ray on {link.target} has ended ({job.folder}/log there says why)"
            if at_once == _MOST_AT_ONCE:
                self._tell(f"error: {ended}, {at_once} times at once: it is not started again")
                return
            self._tell(f"{ended}: it is started again")
            await asyncio.sleep(_LOOK_SECONDS)

    async def _once(self, number: int, start: int, link: Link, python: str) -> tuple[jobs.Job, int | None]:
        """Have the node started, and wait for its end."""
        run_id = f"{self._run_id}-ray{number}-{start}"
        folder = f"{await self._home(link)}/.buckeye/jobs/{run_id}"
        job = self._jobs[number] = jobs.Job(run_id=run_id, folder=folder, python=python)
        await self._through_cuts(link, partial(self._begin, link, job))
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

    async def _begin(self, link: Link, job: jobs.Job) -> None:
        program = [job.python, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        settings: dict[str, object] = {
            "argv": [*program, "--address", self._head],
            "cwd": job.folder,
            "output_dir": job.folder,
            "env": {},
            "dead_man": None,
        }
        await jobs.prepare(link, job, settings)
        await jobs.start(link, job, self.secrets)

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
