"""Start and end the sessions of a gateway, within its limits on number, time and disk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from buckeye.base import heartbeat
from buckeye.base.columns import counted
from buckeye.errors import UsageError
from buckeye.mcp.client.errors import McpEnvironmentError
from buckeye.mcp.fork_server.pool import START_COUNTS
from buckeye.mcp.gateway.json_rpc import SERVER_ERROR
from buckeye.mcp.gateway.running_environment import RunningEnvironment, is_larger, start_environment
from buckeye.mcp.gateway.session import GatewaySession
from buckeye.mcp.gateway.settings import GatewayError, GatewaySettings, LaunchRequest
from buckeye.mcp.sandbox.runtime import PrepareError, Runtime, RuntimeUnavailableError

log = logging.getLogger(__name__)

_SWEEP_SECONDS = 1.0
_MAX_ENDED = 1000


class Gateway:
    """All sessions of a gateway and their environments. Use it in one event loop, and call `close`."""

    def __init__(self, settings: GatewaySettings, runtime: Runtime, folders: Path) -> None:
        self.settings = settings
        self._runtime, self._folders = runtime, folders
        self._sessions: dict[str, GatewaySession] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._slots = asyncio.Semaphore(settings.sessions)
        self._queued = 0
        self._started = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._preparing: dict[str, asyncio.Lock] = {}
        self._sweeping = self._run(self._sweep())
        self._closing = False

    async def open(self, launch_request: LaunchRequest) -> GatewaySession:
        """Wait for a free slot, start an environment, and open a session with it. Raises GatewayError."""
        await self._acquire_slot()
        start = time.monotonic()
        try:
            environment = await self._start(launch_request)
            if self._closing:  # the gateway began to close while this session waited or started
                await environment.stop(grace=0.0)
                raise _stopping_error()
        except BaseException as error:
            self._slots.release()
            refusal = _to_gateway_error(error)
            if isinstance(refusal, GatewayError):
                log.info("Session not started: %s", refusal)
            raise refusal from None
        session = GatewaySession(environment, launch_request, self._on_end)
        self._sessions[session.id] = session
        self._started += 1
        seconds, running, text = time.monotonic() - start, len(self._sessions), _describe(launch_request)
        log.info("Session %s started in %.2f s: %s; %d running", session.name, seconds, text, running)
        return session

    def find(self, session_id: str) -> GatewaySession:
        """Return the running session with this id. Raises GatewayError 404 if the session does not run."""
        session = self._sessions.get(session_id)
        if session is not None:
            return session
        reason = self._ended.get(session_id)
        message = f"Session ended: {reason}" if reason else "No session with this id on this gateway"
        raise GatewayError(404, "session_ended" if reason else "session", message)

    async def close(self) -> None:
        """End all sessions, and wait until their processes and folders are removed."""
        self._closing = True
        for session in list(self._sessions.values()):
            session.end("the gateway is stopping")
        self._sweeping.cancel()
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def status(self) -> dict[str, Any]:
        """Return the content of `GET /status`."""
        now = time.monotonic()
        return {
            "running": len(self._sessions),
            "limit": self.settings.sessions,
            "waiting": self._queued,
            "started": self._started,
            "forked": START_COUNTS["forked"],
            "sessions": [
                {
                    "session": session.name,
                    "image": session.launch_request.image,
                    "variables": [name for name, _ in session.launch_request.variables],
                    "seconds": round(now - session.started_at, 1),
                    "idle_seconds": round(now - session.last_used, 1),
                    "requests": session.requests,
                    "dropped_messages": session.dropped,
                    "lines_that_are_no_messages": session.environment.process.garbage_lines,
                }
                for session in self._sessions.values()
            ],
        }

    async def _acquire_slot(self) -> None:
        limit, seconds = self.settings.sessions, self.settings.queue_seconds
        if self._closing:
            raise _stopping_error()
        self._queued += 1
        try:
            async with asyncio.timeout(seconds):
                await self._slots.acquire()
        except TimeoutError:
            message = (
                f"The gateway is at its limit of {counted(limit, 'session')} (`--sessions`), and no session "
                f"ended within {seconds:g} s (`--queue-seconds`)"
            )
            raise GatewayError(503, "busy", message, code=SERVER_ERROR) from None
        finally:
            self._queued -= 1

    async def _start(self, launch_request: LaunchRequest) -> RunningEnvironment:
        runtime, image = self._runtime, launch_request.image
        if not runtime.environment_flag and not image:
            raise UsageError(
                "no image for this session",
                code="BK-IMAGE",
                hint="send the header `Mcp-Image` (in `mcp_config` of the task), or start the gateway with "
                "`--image`, `--command` or `--dir`",
            )
        if runtime.environment_flag and image and image not in self._preparing:
            log.warning(
                "Header `Mcp-Image: %s` ignored: all sessions run %s", image, runtime.environment_flag
            )
        async with self._preparing.setdefault(image, asyncio.Lock()):
            await runtime.prepare(image)
        return await start_environment(runtime, launch_request, self._folders, preload=self.settings.preload)

    def _on_end(self, session: GatewaySession, reason: str) -> None:
        self._sessions.pop(session.id, None)
        self._ended[session.id] = reason
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        seconds = time.monotonic() - session.started_at
        counts = session.name, seconds, session.requests
        log.info("Session %s ended after %.1f s and %d requests: %s", *counts, reason)
        if session.dropped:
            log.warning("Session %s: dropped %d unread messages", session.name, session.dropped)
        self._run(self._stop(session))

    async def _stop(self, session: GatewaySession) -> None:
        try:
            await session.environment.stop()
        finally:
            self._slots.release()

    async def _sweep(self) -> None:
        settings = self.settings
        limits = (settings.left_seconds, settings.idle_seconds, settings.session_seconds)
        pause = min(_SWEEP_SECONDS, *(limit / 4 for limit in limits))
        while True:
            heartbeat.report("requests", on="orchestrator")
            heartbeat.pulse()
            await asyncio.sleep(pause)
            sessions = list(self._sessions.values())
            over_limit = await asyncio.to_thread(_sessions_over_limit, sessions, settings.disk)
            now = time.monotonic()
            for session in sessions:
                if now - session.started_at > settings.session_seconds:
                    session.end(f"maximum lifetime of {settings.session_seconds:g} s (`--session-seconds`)")
                elif not session.in_use and now - (session.disconnected_at or now) > settings.left_seconds:
                    session.end(f"the client disconnected {settings.left_seconds:g} s ago (`--left-seconds`)")
                elif not session.in_use and now - session.last_used > settings.idle_seconds:
                    session.end(f"no request for {settings.idle_seconds:g} s (`--idle-seconds`)")
                elif session in over_limit:
                    session.end(f"its folder is larger than {settings.disk:,} bytes (`--disk`)")

    def _run(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            if (error := task.exception()) is not None:
                log.error("Background task failed: %s: %s", type(error).__name__, error)


def _stopping_error() -> GatewayError:
    return GatewayError(503, "stopping", "The gateway is stopping", code=SERVER_ERROR)


def _to_gateway_error(error: BaseException) -> BaseException:
    """Return the GatewayError for a failed start of an environment, or any other error unchanged."""
    if isinstance(error, UsageError):
        return GatewayError(400, "environment", str(error), code=SERVER_ERROR)
    if isinstance(error, PrepareError | RuntimeUnavailableError | McpEnvironmentError | OSError):
        return GatewayError(502, "start_failed", str(error), code=SERVER_ERROR)
    return error


def _describe(launch_request: LaunchRequest) -> str:
    names = ", ".join(name for name, _ in launch_request.variables)
    return (launch_request.image or "the default environment") + (f" with {names}" if names else "")


def _sessions_over_limit(sessions: list[GatewaySession], max_bytes: int) -> list[GatewaySession]:
    """Return the sessions whose folders are larger than `max_bytes` bytes.

    Run this in one thread for all sessions, because a thread per session would double the cost.
    """
    return [session for session in sessions if is_larger(session.environment.root, max_bytes)]
