"""Orchestrator's side of the processes that run its rollouts: start and restart them, and get groups."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

import msgspec

from buckeye.base.columns import counted
from buckeye.base.process import PYTHON, ChildProcess, ends_within, hand_over_secrets
from buckeye.config.environments import TrainEnvConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.outcome_validation import error_outcome
from buckeye.errors import FinalRunError, RunError
from buckeye.inference.client import InferenceClient
from buckeye.inference.client.follower import ClientUse, ServerUse, add_use, server_states
from buckeye.inference.client.replica import ReplicaLostError
from buckeye.orchestrator.loop_watch import lateness_metrics
from buckeye.orchestrator.rollout import Group, InFlightGroup, Rollout
from buckeye.orchestrator.task_sampler import GroupTask
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
    with_task,
)
from buckeye.workers.worker_side.frames import FrameError, read_body

log = logging.getLogger(__name__)

_PROGRAM = ("-m", "buckeye.cli.rollout_worker")
_MAX_RESTARTS, _RESTART_SECONDS = 5, 600.0
_SILENT_SECONDS = 1800.0  # an environment may block the event loop of its worker for long, or load slowly
_POLL_SECONDS = 0.05
_CLOSE_SECONDS = 5.0  # the launcher kills the orchestrator after ten seconds
_MAX_LOSSES = 3  # workers that may end while they run one group


class _WorkerLostError(Exception):
    """A worker ended while it ran a group."""


@dataclass(slots=True)
class _RunningGroup:
    """Group that a worker runs. `rollouts` has those that have arrived."""

    size: int
    flight: InFlightGroup
    ended: asyncio.Future[list[Rollout]]
    rollouts: list[Rollout] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Worker:
    """Worker process, and its groups by number."""

    index: int
    process: ChildProcess
    writer: asyncio.StreamWriter
    groups: dict[int, _RunningGroup] = field(default_factory=dict)
    use: ClientUse = field(default_factory=ClientUse)
    servers: Servers | None = None
    last_message_at: float = field(default_factory=time.monotonic)

    def post(self, message: msgspec.Struct) -> None:
        """Send a message, unless the worker has ended."""
        if not self.writer.is_closing():
            self.writer.write(encode(message))

    async def close(self) -> None:
        """Close the connection, which ends the worker. Kill it if it takes too long."""
        self.writer.close()
        if not await ends_within(self.process, _CLOSE_SECONDS):
            await asyncio.to_thread(self.process.end, 1.0, session=True)


@dataclass(frozen=True, slots=True)
class _GroupSession:
    """Session of a group in its worker, to end its requests."""

    worker: _Worker
    number: int

    async def abort(self) -> None:
        """End the sampling of the group."""
        self.worker.post(Cut(self.number))


class RolloutWorkers:
    """Runner of groups in `config.workers` processes. Use it as an async context manager.

    `client` supervises the servers, and the workers follow it. Each gets its share of the requests to a
    server, and of all other limits. A group whose worker ends is retried in another one, until
    `_MAX_LOSSES` have ended. Then its rollouts are errored with the boundary "worker". `version` returns the
    version of the policy, and `evaluates` True if this process also samples.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        client: InferenceClient,
        *,
        seed: int,
        version: Callable[[], int],
        evaluates: Callable[[], bool] = lambda: False,
        program: Sequence[str] = _PROGRAM,
    ) -> None:
        self._config, self._client, self._seed = config, client, seed
        self._version, self._evaluates, self._program = version, evaluates, program
        self._numbers = itertools.count()
        self._workers: dict[int, _Worker] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._restarts: dict[int, deque[float]] = {i: deque() for i in range(config.workers)}
        self._error: BaseException | None = None
        self._delays: list[float] = []
        self._held_up = 0.0
        self._lost = 0
        self.attempts = 0
        """Number of finished attempts, including failed ones, and those that a worker has lost."""

    async def __aenter__(self) -> RolloutWorkers:
        for replica in self._client.replicas:
            replica.share = (self._config.workers, self._config.workers + 1)
        for index in range(self._config.workers):
            await self._start(index)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reader in self._readers:
            reader.cancel()  # first, because a reader replaces a worker that has ended
        await asyncio.gather(*self._readers, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [worker.process.pid for worker in self._workers.values()]

    @property
    def requests_in_flight(self) -> int:
        """Number of requests of all workers, at their last reports."""
        servers = [use for worker in self._workers.values() for use in worker.use.servers]
        return sum(use.requests_in_flight for use in servers)

    async def run(self) -> None:
        """Send versions and states of servers to the workers, and kill silent workers, until cancelled.

        Raise `RunError` if a worker reports an error of the run, or ends too often, and any error of the
        functions that read messages and start workers.
        """
        while self._error is None:
            self.send_servers()
            for worker in self._workers.values():
                if worker.process.returncode is not None:
                    continue  # this property kills children that hold the connection of an ended worker
                silent = time.monotonic() - worker.last_message_at
                if silent > _SILENT_SECONDS:
                    log.warning("Rollout worker %d: no message for %.0f s", worker.index, silent)
                    worker.process.end(0.0, session=True)
            await asyncio.sleep(_POLL_SECONDS)
        raise self._error

    def send_servers(self) -> None:
        """Send the version and the states of the servers to the workers, if they have changed."""
        clients = self._config.workers + self._evaluates()
        servers = Servers(self._version(), server_states(self._client.replicas), clients)
        for worker in self._workers.values():
            if worker.servers != servers:
                worker.servers = servers
                worker.post(servers)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the workers since the last call, and the counts of restarts and losses."""
        delays, self._delays = self._delays, []
        held_up, self._held_up = self._held_up, 0.0
        return {
            **lateness_metrics("time/workers_late", delays),
            "time/workers_held_up": held_up,
            "workers/restarts": sum(map(len, self._restarts.values())),
            "workers/lost_rollouts": self._lost,
        }

    # --- groups ---

    def start_group(
        self, group: GroupTask, size: int, flight: InFlightGroup | None = None
    ) -> asyncio.Task[Group]:
        """Start `size` rollouts of one task in the worker that has the fewest groups."""
        return asyncio.create_task(self._run_group(group, size, flight or InFlightGroup(group.index, size)))

    async def _run_group(self, group: GroupTask, size: int, flight: InFlightGroup) -> Group:
        lost: list[Rollout] = []  # one for each worker that has ended
        while True:
            began = asyncio.get_running_loop().time()
            try:
                ended = await self._run_in_worker(group, size, flight)
            except _WorkerLostError as error:
                lost.append(_lost_rollout(group, str(error), began, is_cut=flight.is_cut))
                self._lost += size
                self._count(flight, size)
                flight.losses += 1
                if flight.losses < _MAX_LOSSES and not flight.is_cut:
                    continue
                ended = [lost.pop()] * size
            else:
                self._count(flight, sum(1 + len(rollout.earlier_attempts) for rollout in ended))
            if lost:
                ended = [replace(r, earlier_attempts=(*lost, *r.earlier_attempts)) for r in ended]
            return Group(index=group.index, rollouts=tuple(ended))

    def _count(self, flight: InFlightGroup, attempts: int) -> None:
        self.attempts += attempts
        flight.attempts += attempts

    async def _run_in_worker(self, group: GroupTask, size: int, flight: InFlightGroup) -> list[Rollout]:
        worker = min(self._workers.values(), key=lambda w: (w.writer.is_closing(), len(w.groups)))
        number = next(self._numbers)
        running = _RunningGroup(size, flight, asyncio.get_running_loop().create_future())
        worker.groups[number] = running
        worker.post(Start(number, group.index, group.task.id, size, flight.losses))
        flight.add_session(_GroupSession(worker, number))
        if flight.is_cut:
            worker.post(Cut(number))
        try:
            return [with_task(rollout, group.task) for rollout in await running.ended]
        finally:
            worker.groups.pop(number, None)

    # --- workers ---

    async def _start(self, index: int) -> None:
        config, (ours, theirs) = self._config, socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours, limit=STREAM_LIMIT)
        env, secrets = hand_over_secrets({**os.environ, "BUCKEYE_PARENT_PID": str(os.getpid())})
        passed = [theirs.fileno(), *([] if secrets is None else [secrets])]
        argv = [*PYTHON, *self._program, str(theirs.fileno()), str(index)]
        try:
            process = ChildProcess(argv, env=env, pass_fds=passed, guarded=True)
        finally:
            theirs.close()
            if secrets is not None:
                os.close(secrets)
        self._workers[index] = worker = _Worker(index, process, writer)
        worker.post(Setup(_share(config, index).model_dump_json(), self._seed, index, config.workers))
        self.send_servers()
        reading = asyncio.create_task(self._read(worker, reader))
        self._readers.add(reading)
        reading.add_done_callback(self._end_reading)

    def _end_reading(self, reading: asyncio.Task[None]) -> None:
        self._readers.discard(reading)
        if not reading.cancelled():
            self._error = self._error or reading.exception()

    async def _read(self, worker: _Worker, reader: asyncio.StreamReader) -> None:
        problem = ""
        try:
            while True:
                self._receive(worker, decode(await read_body(reader)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except (FrameError, ValueError) as error:  # ValueError: of msgspec
            problem = f"it sent an invalid message: {error}"
        await self._replace(worker, problem)

    def _receive(self, worker: _Worker, message: msgspec.Struct) -> None:
        worker.last_message_at = time.monotonic()
        if isinstance(message, Finished):
            running = worker.groups.get(message.number)
            if running is None:
                return  # the group was cancelled
            running.rollouts.append(message.rollout)
            if len(running.rollouts) == running.size and not running.ended.done():
                running.ended.set_result(running.rollouts)
        elif isinstance(message, Begun) and message.number in worker.groups:
            worker.groups[message.number].flight.begin(message.version)
        elif isinstance(message, Pulse):
            add_use(self._client, worker.use, message.use)
            worker.use = message.use
            self._delays += message.late
            self._held_up += message.held_up
        elif isinstance(message, ServerLost):
            error = ReplicaLostError(message.reason)
            self._client.handle_lost_call(self._client.replicas[message.server], message.epoch, error)
        elif isinstance(message, Failed):
            kind = FinalRunError if message.final else RunError
            self._error = self._error or kind(message.message, code=message.code, hint=message.hint)

    async def _replace(self, worker: _Worker, problem: str) -> None:
        """Fail the groups of a worker that has ended, and start a new one, unless this happens too often."""
        if problem:
            worker.process.end(0.0, session=True)
        await worker.close()
        reason = problem or _exit_reason(worker.process.returncode)
        grown = [ServerUse(use.requests, use.tokens, use.drops) for use in worker.use.servers]
        add_use(self._client, worker.use, ClientUse(tuple(grown), worker.use.requeued))
        restarts, now = self._restarts[worker.index], time.monotonic()
        if sum(now - at < _RESTART_SECONDS for at in restarts) >= _MAX_RESTARTS:
            self._error = self._error or RunError(
                f"rollout worker {worker.index} has ended {_MAX_RESTARTS + 1} times within "
                f"{_RESTART_SECONDS:.0f} s; the last time, {reason}",
                code="BK-ROLLOUT-WORKER",
                hint="read the lines before it in logs/run.log, and check the free memory",
            )
        if self._error is None:
            restarts.append(now)
            await self._start(worker.index)
        groups = [running for running in worker.groups.values() if not running.ended.done()]
        lost = counted(sum(running.size for running in groups), "rollout")
        log.warning("Rollout worker %d has ended: %s; %s lost", worker.index, reason, lost)
        for running in groups:  # also those that started before the new worker
            running.ended.set_exception(_WorkerLostError(reason))


def shared_environments(config: OrchestratorConfig, index: int) -> list[TrainEnvConfig]:
    """Return the environments for process `index`, with its share of their limits.

    The orchestrator is the last of the processes.
    """
    clients = config.rollout_clients
    return [
        env.model_copy(
            update={
                "max_concurrent": env.max_concurrent and (env.max_concurrent + index) // clients,
                "rate_limit": env.rate_limit and env.rate_limit / clients,
                "workers": max(1, (env.workers + index) // config.workers),
            }
        )
        for env in config.env
    ]


def _share(config: OrchestratorConfig, index: int) -> OrchestratorConfig:
    """Return the configuration of worker `index`, with its share of each limit of the run."""
    rollouts = config.max_concurrent and (config.max_concurrent + index) // config.workers
    environments = shared_environments(config, index)
    return config.model_copy(update={"env": environments, "max_concurrent": rollouts, "workers": 1})


def _exit_reason(code: int | None) -> str:
    if code is None:
        return "it closed its connection"
    return f"it was killed by signal {-code}" if code < 0 else f"it exited with code {code}"


def _lost_rollout(group: GroupTask, reason: str, began: float, *, is_cut: bool) -> Rollout:
    """Return the rollout of a worker that has ended."""
    now = asyncio.get_running_loop().time()
    return Rollout(
        env_name=group.env.name,
        task=group.task,
        outcome=error_outcome("worker", f"the process of the rollout has ended: {reason}"),
        segments=(),
        truncated=False,
        turns=0,
        seconds=now - began,
        end_time=now,
        cut=is_cut,
    )
