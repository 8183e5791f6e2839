"""Process that runs rollouts for the orchestrator.

It has its own event loop, environments and inference client. The orchestrator starts it, and holds the other
end of its connection. It ends with the orchestrator.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from buckeye.base.keys import key_for
from buckeye.base.process import forbid_tracing, run_identity
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.errors import BuckeyeError, RunError, UsageError
from buckeye.inference.client.follower import FollowingClient
from buckeye.inference.render import ChatRenderer
from buckeye.monitor.log import run_log, setup_logging
from buckeye.orchestrator.advantages import reward_shaping
from buckeye.orchestrator.coroutines import collect_garbage
from buckeye.orchestrator.environments import load_environments
from buckeye.orchestrator.evaluation_schedule import sampling_params
from buckeye.orchestrator.loop_watch import SWITCH_SECONDS, LoopWatch
from buckeye.orchestrator.rollout import InFlightGroup
from buckeye.orchestrator.rollout_runner import RolloutRunner, recording_runner
from buckeye.orchestrator.task_sampler import TaskSampler
from buckeye.orchestrator.worker_messages import (
    STREAM_LIMIT,
    Begun,
    Cut,
    Failed,
    Finished,
    Pulse,
    ServerLost,
    Servers,
    Setup,
    Start,
    decode,
    encode,
    to_send,
)
from buckeye.workers.worker_side.frames import MAX_FRAME, FrameError, read_body

_PULSE_SECONDS = 0.1

log = logging.getLogger(__name__)

LostServerReport = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a worker: its tasks, its runner, and its client, which follows the orchestrator's client."""

    sampler: TaskSampler
    runner: RolloutRunner
    client: FollowingClient


class RolloutWorker:
    """Worker's end of the connection. `open_parts` makes its parts from the first message."""

    def __init__(
        self,
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        open_parts: Callable[[Setup, LostServerReport], Parts],
    ) -> None:
        self._reader, self._writer = connection
        self._open_parts = open_parts
        self._parts: Parts | None = None
        self._index = self._version = 0
        self._flights: dict[int, InFlightGroup] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._watch = LoopWatch()

    async def run(self) -> None:
        """Run groups until the connection ends. An error of Buckeye ends the worker and the run."""
        try:
            setup = await self._receive()
            assert isinstance(setup, Setup)
            self._index, self._parts = setup.index, self._open_parts(setup, self._report_lost)
            await self._run_groups(self._parts.client)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the orchestrator has ended
        except (BuckeyeError, FrameError, ValueError) as error:
            await self._fail(error)

    async def _run_groups(self, client: FollowingClient) -> None:
        self._watch.start()
        background = [asyncio.create_task(work) for work in (self._pulse(client), collect_garbage())]
        try:
            async with client:
                while True:
                    self._handle(await self._receive())
                    await asyncio.sleep(0)  # not all groups that arrive together start at once
        finally:
            self._watch.stop()
            for task in (*background, *self._running):
                task.cancel()
            await asyncio.gather(*background, *self._running, return_exceptions=True)

    async def _receive(self) -> msgspec.Struct:
        return decode(await read_body(self._reader, MAX_FRAME))  # type: ignore[no-any-return]

    def _handle(self, message: msgspec.Struct) -> None:
        assert self._parts is not None
        if isinstance(message, Servers):
            self._version = message.version
            self._parts.client.follow(message.states, (self._index, message.clients))
        elif isinstance(message, Start):
            task = asyncio.create_task(self._run_group(message))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        elif isinstance(message, Cut) and message.number in self._flights:
            self._flights[message.number].cut()

    async def _run_group(self, start: Start) -> None:
        flight = InFlightGroup(
            start.index,
            start.size,
            current_version=lambda: self._version,
            losses=start.losses,
            on_begin=lambda version: self._post(Begun(start.number, version)),
        )
        self._flights[start.number] = flight
        assert self._parts is not None
        try:
            group = self._parts.sampler[start.index]
            if group.task.id != start.task:
                raise UsageError(
                    f"environment {group.env.name} lists different tasks in two processes: group "
                    f"{start.index} is task {start.task!r} in one and {group.task.id!r} in the other",
                    code="BK-ENV-TASKS",
                    hint="return the tasks in a fixed order, or set orchestrator.workers = 1",
                )
            ended = await self._parts.runner.start_group(group, start.size, flight)
            for rollout in ended.rollouts:
                self._post(Finished(start.number, to_send(rollout)))
                await self._writer.drain()
        except (asyncio.CancelledError, ConnectionError):
            raise
        except BaseException as error:  # a bug in Buckeye: rollouts do not raise
            await self._fail(error)
        finally:
            del self._flights[start.number]

    async def _pulse(self, client: FollowingClient) -> None:
        while True:
            await asyncio.sleep(_PULSE_SECONDS)
            self._post(Pulse(client.use(), self._watch.take_delays(), self._watch.take_seconds()))

    def _report_lost(self, server: int, epoch: int, reason: str) -> None:
        self._post(ServerLost(server, epoch, reason))

    async def _fail(self, error: BaseException) -> None:
        known = error if isinstance(error, BuckeyeError) else RunError(f"{type(error).__name__}: {error}")
        self._post(Failed(known.message, known.code, known.hint, known.final))
        await self._writer.drain()

    def _post(self, message: msgspec.Struct) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode(message))


def run_rollout_worker(descriptor: int) -> None:
    """Run rollouts for the process at the other end of a socket, until the connection ends."""
    forbid_tracing()
    sys.setswitchinterval(SWITCH_SECONDS)
    asyncio.run(serve(descriptor, _open_parts))


async def serve(descriptor: int, open_parts: Callable[[Setup, LostServerReport], Parts]) -> None:
    """Run a `RolloutWorker` on a socket."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    streams = await asyncio.open_connection(sock=connection, limit=STREAM_LIMIT)
    await RolloutWorker(streams, open_parts).run()


def _open_parts(setup: Setup, report_lost: LostServerReport) -> Parts:
    config = OrchestratorConfig.model_validate_json(setup.config)
    setup_logging(config.log.level, f"rollouts {setup.index}", run_log(config.output_dir))
    log.info("Starting rollout worker %d of %d", setup.index, setup.count)
    logs = config.output_dir / "logs" / f"attempt_{run_identity().attempt}" / f"rollouts_{setup.index}"
    environments = load_environments(config.env, rollout_timeout=config.rollout_timeout, log_dir=logs)
    client = FollowingClient(
        config.client.base_url,
        api_key=key_for(config.client.api_key_var, config.client.base_url[0]) or None,
        timeout=config.client.timeout,
        model=config.model.name,
        on_lost=report_lost,
    )
    runner = recording_runner(
        config,
        client,
        ChatRenderer(config.model.name),
        seed=setup.seed,
        params=sampling_params(config),
        shaping=reward_shaping(config),
    )
    return Parts(TaskSampler(environments, seed=config.seed), runner, client)
