"""All sessions of a gateway: start, end and cleanup."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from typing import Any

from buckeye.base import heartbeat
from buckeye.errors import UsageError
from buckeye.mcp.client.errors import McpEnvironmentError
from buckeye.mcp.fork_server.pool import START_COUNTS
from buckeye.mcp.gateway.json_rpc import SERVER_ERROR
from buckeye.mcp.gateway.running_environment import RunningEnvironment, is_larger, start_environment
from buckeye.mcp.gateway.session import GatewaySession
from buckeye.mcp.gateway.settings import GatewayError, GatewaySettings, LaunchRequest
from buckeye.mcp.sandbox.runtime import FolderFactory, PrepareError, Runtime, RuntimeUnavailableError

log = logging.getLogger(__name__)

_SWEEP_SECONDS = 1.0
_REMEMBERED = 1000


class Gateway:
    """Sessions and their environments. Belongs to one event loop; `close` ends every environment."""

    def __init__(self, settings: GatewaySettings, runtime: Runtime, folders: FolderFactory) -> None:
        self.settings = settings
        self._runtime, self._places = runtime, folders
        self._sessions: dict[str, GatewaySession] = {}
        self._named: dict[tuple[str, LaunchRequest], GatewaySession] = {}
        self._opening: dict[tuple[str, LaunchRequest], asyncio.Lock] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._free = asyncio.Semaphore(settings.sessions)
        self._queued = 0
        self._total = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._preparing: dict[str, asyncio.Lock] = {}
        self._sweeping = self._run(self._sweep())
        self._closing = False

    async def open(self, launch_request: LaunchRequest) -> GatewaySession:
        """Open a session with a separate environment, after waiting for a free slot. Raises GatewayError."""
        await self._turn()
        begun = time.monotonic()
        try:
            started = await self._start(launch_request)
            if self._closing:  # the gateway began to close while this session waited or started
                await started.stop(grace=0.0)
                raise _stopping()
        except BaseException as error:
            self._free.release()
            raise _refusal(error) from None
        session = GatewaySession(started, launch_request, self._on_end)
        self._sessions[session.id] = session
        self._total += 1
        seconds, running = time.monotonic() - begun, len(self._sessions)
        log.info(
            "%s started in %.2f s: %s; %d running", session.name, seconds, _shown(launch_request), running
        )
        return session

    async def open_named(self, name: str, launch_request: LaunchRequest) -> GatewaySession:
        """Return the session that a client without protocol sessions calls `name`; the first use opens it."""
        key = (name, launch_request)
        async with self._opening.setdefault(key, asyncio.Lock()):
            session = self._named.get(key)
            if session is None or session.ended is not None:
                session = self._named[key] = await self.open(launch_request)
        return session

    def find(self, session_id: str) -> GatewaySession:
        """Return a running session by id. Raises GatewayError 404, with the reason if it has ended."""
        session = self._sessions.get(session_id)
        if session is not None:
            return session
        why = self._ended.get(session_id)
        message = f"The session has ended: {why}" if why else "There is no such session on this gateway."
        raise GatewayError(404, "session_ended" if why else "session", message)

    def find_named(self, name: str, launch_request: LaunchRequest) -> GatewaySession:
        """Return a running session by its client's name for it. Raises GatewayError 404."""
        session = self._named.get((name, launch_request))
        if session is None:
            raise GatewayError(404, "session", "There is no session of this name, image and variables.")
        return session

    async def close(self) -> None:
        """End all sessions, and wait until nothing of them is left."""
        self._closing = True
        for session in list(self._sessions.values()):
            session.end("the gateway stops")
        self._sweeping.cancel()
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def status(self) -> dict[str, Any]:
        """Return the figures of `GET /status`. Sessions are named by a prefix of their ids."""
        now = time.monotonic()
        return {
            "running": len(self._sessions),
            "limit": self.settings.sessions,
            "waiting": self._queued,
            "started": self._total,
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

    async def _turn(self) -> None:
        limit, seconds = self.settings.sessions, self.settings.queue_seconds
        if self._closing:
            raise _stopping()
        self._queued += 1
        try:
            async with asyncio.timeout(seconds):
                await self._free.acquire()
        except TimeoutError:
            raise GatewayError(
                503,
                "busy",
                f"All {limit} environments (--sessions) are in use, and none became free within "
                f"{seconds:g} s (--queue-seconds).",
                code=SERVER_ERROR,
            ) from None
        finally:
            self._queued -= 1

    async def _start(self, launch_request: LaunchRequest) -> RunningEnvironment:
        runtime, image = self._runtime, launch_request.image
        if not runtime.only_environment and not image:
            raise UsageError(
                "This session names no image. Send the header Mcp-Image (in the task's mcp_config), or start "
                "the gateway with --image, --command or --dir."
            )
        if runtime.only_environment and image and image not in self._preparing:
            log.warning("Sessions that ask for the image %s get %s", image, runtime.only_environment)
        async with self._preparing.setdefault(image, asyncio.Lock()):
            await runtime.prepare(image)
        return await start_environment(runtime, launch_request, self._places, preload=self.settings.preload)

    def _on_end(self, session: GatewaySession, reason: str) -> None:
        self._sessions.pop(session.id, None)
        for key in [key for key, other in self._named.items() if other is session]:
            del self._named[key], self._opening[key]
        self._ended[session.id] = reason
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        seconds = time.monotonic() - session.started_at
        log.info("%s ended after %.1f s and %d requests: %s", session.name, seconds, session.requests, reason)
        if session.dropped:
            log.warning("%s: %d messages that nobody fetched were dropped", session.name, session.dropped)
        self._run(self._stop(session))

    async def _stop(self, session: GatewaySession) -> None:
        try:
            await session.environment.stop()
        finally:
            self._free.release()

    async def _sweep(self) -> None:
        settings = self.settings
        limits = (settings.left_seconds, settings.idle_seconds, settings.session_seconds)
        pause = min(_SWEEP_SECONDS, *(limit / 4 for limit in limits))
        while True:
            heartbeat.report("requests", on="orchestrator")
            heartbeat.pulse()
            await asyncio.sleep(pause)
            sessions = list(self._sessions.values())
            full = await asyncio.to_thread(_full, sessions, settings.disk)
            now = time.monotonic()
            for session in sessions:
                if now - session.started_at > settings.session_seconds:
                    session.end(f"it lasted {settings.session_seconds:g} s (--session-seconds)")
                elif not session.in_use and now - (session.disconnected_at or now) > settings.left_seconds:
                    session.end(f"its client has been away for {settings.left_seconds:g} s (--left-seconds)")
                elif not session.in_use and now - session.last_used > settings.idle_seconds:
                    session.end(f"nothing was asked for {settings.idle_seconds:g} s (--idle-seconds)")
                elif session in full:
                    session.end(f"its folder holds more than {settings.disk} bytes (--disk)")

    def _run(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            if (error := task.exception()) is not None:
                log.error("In the background: %s: %s", type(error).__name__, error)


def _stopping() -> GatewayError:
    return GatewayError(503, "stopping", "The gateway is stopping.", code=SERVER_ERROR)


def _refusal(error: BaseException) -> BaseException:
    """Return the refusal that a client receives for a failed start; other errors unchanged."""
    if isinstance(error, UsageError):
        return GatewayError(400, "environment", str(error), code=SERVER_ERROR)
    if isinstance(error, PrepareError | RuntimeUnavailableError | McpEnvironmentError):
        return GatewayError(502, "start_failed", str(error), code=SERVER_ERROR)
    return error


def _shown(launch_request: LaunchRequest) -> str:
    names = ", ".join(name for name, _ in launch_request.variables)
    return (launch_request.image or "the default environment") + (f" with {names}" if names else "")


def _full(sessions: list[GatewaySession], max_bytes: int) -> list[GatewaySession]:
    """Return the sessions whose folders hold more than `max_bytes` bytes.

    One call checks all of them, because a thread per session costs as much as the check.
    """
    return [session for session in sessions if is_larger(session.environment.root, max_bytes)]
