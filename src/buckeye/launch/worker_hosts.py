"""Worker hosts. A worker host is a process on another node, which starts environment workers on that node.

A client connects to it with the key of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from buckeye.base import heartbeat
from buckeye.base.process import PYTHON, die_with_parent, forbid_tracing, signal_group
from buckeye.base.process_guard import GUARD
from buckeye.config.environments import EnvConfig, TrainEnvConfig
from buckeye.envs.settings import PLACEMENT_VARIABLE
from buckeye.errors import UsageError
from buckeye.launch.mcp_gateways import plan_gateways
from buckeye.launch.plan import EnvironmentProcesses, PlanNode, Role
from buckeye.monitor.log import setup_logging
from buckeye.orchestrator.environments import default_environment_name
from buckeye.workers.errors import WorkerError
from buckeye.workers.process import memory_problem
from buckeye.workers.process_start import WORKERS_KEY, start_process, worker_variables
from buckeye.workers.worker_side.frames import HEADER, FrameError, decode, encode, read_body

log = logging.getLogger(__name__)

_PROGRAM = ("-m", "buckeye.cli.worker_host")
_CHUNK_BYTES = 1 << 16
_MAX_REQUEST_BYTES = 1 << 20
_KEY_SECONDS = 10.0
_POLL_SECONDS = 2.0


def plan_environment_processes(
    environments: Sequence[EnvConfig],
    *,
    rollouts: int,
    plan_nodes: Mapping[int, PlanNode],
    address: str | None,
) -> EnvironmentProcesses:
    """Return the processes that a run must start for its environments.

    These are gateways for MCP servers, and worker hosts on the other nodes in `plan_nodes`. These nodes reach
    this host at `address`. The run has `rollouts` concurrent rollouts. Raises UsageError for tasks that
    cannot be read, and for environments that cannot run on other nodes.
    """
    gateways = plan_gateways(environments, rollouts=rollouts)
    placed = [env for env in environments if isinstance(env, TrainEnvConfig) and any(env.placement or ())]
    if not placed:
        return gateways
    assert address is not None, "a placed environment has other nodes, which reach this one"
    hosts = worker_hosts(placed, plan_nodes=plan_nodes, address=address)
    return EnvironmentProcesses(roles=(*gateways.roles, *hosts.roles), env={**gateways.env, **hosts.env})


def worker_hosts(
    environments: Sequence[TrainEnvConfig], *, plan_nodes: Mapping[int, PlanNode], address: str
) -> EnvironmentProcesses:
    """Return the worker hosts of environments that are placed on the nodes in `plan_nodes`.

    The workers reach the policy on this host at `address`. Raises UsageError for an environment with
    `isolation = "none"`, which does not run in workers.
    """
    for env in environments:
        if env.isolation == "none":
            raise UsageError(
                f'{env.id}: placement = {env.placement} excludes isolation = "none"',
                code="BK-CONFIG-CONFLICT",
                hint="remove one of these settings",
            )
    key = secrets.token_urlsafe(24)
    roles: dict[int, Role] = {}
    for node in sorted({node for env in environments for node in env.placement or () if node != 0}):
        site, number = plan_nodes[node], len(roles)
        (port,) = site.choose_ports(1)
        args = ("--host", site.address, "--port", str(port))
        roles[node] = Role(
            kind="workers",
            index=number,
            argv=(*PYTHON, *_PROGRAM, *args),
            env={WORKERS_KEY: key},
            node=node,
            host=site.address,
            port=port,
        )
    addresses = {node: (role.host, role.port) for node, role in roles.items()}
    placement = {
        env.name or default_environment_name(env.id): {
            "address": address,
            "nodes": list(map(addresses.get, env.placement or ())),
        }
        for env in environments
    }
    shared_env = {WORKERS_KEY: key, PLACEMENT_VARIABLE: json.dumps(placement)}
    return EnvironmentProcesses(roles=tuple(roles.values()), env=shared_env)


def serve(host: str, port: int) -> None:
    """Run a worker host: start a worker for each connection with the key of the run.

    Raises UsageError if the key is not set, and PortTakenError if the port is in use.
    """
    from buckeye.base.http_server import listen

    die_with_parent()
    forbid_tracing()
    heartbeat.start()
    key = os.environ.pop(WORKERS_KEY, "")
    if not key:
        raise UsageError(
            f"{WORKERS_KEY} is not set",
            code="BK-KEY-MISSING",
            hint="set it to a key that the clients of this host also have",
        )
    setup_logging("info", "workers", None)
    listener = listen(host, port, change="Choose another --port.")

    async def accept() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, EOFError, FrameError, TimeoutError):
                await _WorkerConnection(reader, writer).run(key)
            writer.close()

        async with await asyncio.start_server(handle, sock=listener):
            log.info("Accepting requests for workers at %s:%d", host, port)
            heartbeat.ready()
            while True:
                heartbeat.report("requests", on="orchestrator")
                heartbeat.pulse()
                await asyncio.sleep(_POLL_SECONDS)

    asyncio.run(accept())


class _WorkerConnection:
    """A connection of a client, and its worker. The worker ends when the connection ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def run(self, key: str) -> None:
        """Start a worker and wait for its end. Start no worker if the key is wrong or missing after 10 s."""
        async with asyncio.timeout(_KEY_SECONDS):
            request = decode(await read_body(self._reader, _MAX_REQUEST_BYTES))
        if not hmac.compare_digest(str(request.get("key")).encode(), key.encode()):
            peer = self._writer.get_extra_info("peername")
            log.warning("Rejected a connection from %s: it does not have the key of the run", peer)
            return
        variables = {str(name): str(value) for name, value in request["variables"].items()}
        try:
            process, connection = await start_process(
                Path(request["python"]), {**worker_variables((), str(request["policy"])), **variables}
            )
        except WorkerError as error:
            await self._send(_output_frame(error.message) + encode({"type": "ended", "code": 1}))
            return
        connection.setblocking(False)
        from_worker, to_worker = await asyncio.open_connection(sock=connection, limit=1 << 20)
        tasks = [
            asyncio.create_task(task)
            for task in (
                self._forward_to(to_worker),
                self._wait_for_memory_limit(process.pid, request.get("max_memory_bytes")),
                process.wait(),
                self._forward_from(from_worker),
                self._forward_output(process),
            )
        ]
        try:
            await asyncio.wait(tasks[:3], return_when=asyncio.FIRST_COMPLETED)
            if process.returncode is not None:
                await asyncio.wait(tasks[3:], timeout=1.0)
                await self._send(encode({"type": "ended", "code": process.returncode}))
        finally:
            signal_group(process.pid)
            GUARD.forget(process.pid)
            for task in tasks:
                task.cancel()
            to_worker.close()
            process._transport.close()  # type: ignore[attr-defined]  # a stray child may hold the pipe

    async def _send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def _forward_to(self, worker: asyncio.StreamWriter) -> None:
        while data := await self._reader.read(_CHUNK_BYTES):
            worker.write(data)
            await worker.drain()

    async def _forward_from(self, worker: asyncio.StreamReader) -> None:
        while True:
            body = await read_body(worker)
            await self._send(HEADER.pack(len(body)) + body)

    async def _forward_output(self, process: Any) -> None:
        while chunk := await process.stdout.read(_CHUNK_BYTES):
            await self._send(_output_frame(chunk))

    async def _wait_for_memory_limit(self, pid: int, limit: int | None) -> None:
        while (problem := memory_problem(pid, limit)) is None:
            await asyncio.sleep(_POLL_SECONDS)
        await self._send(_output_frame(problem))


def _output_frame(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return encode({"type": "printed", "text": data.decode("latin-1")})
