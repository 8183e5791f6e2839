"""Buckeye's side of one worker process: requests, responses, heartbeats, and the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from buckeye.base.process import ends_within, signal_group
from buckeye.base.process_guard import GUARD, MARK_VARIABLE, kill_marked
from buckeye.envs.settings import WorkerSettings
from buckeye.envs.stdlib_only.outcomes import Boundary
from buckeye.workers.errors import BoundaryError, WorkerError, parse_boundary_error
from buckeye.workers.output import WorkerOutput
from buckeye.workers.process_start import start_process, start_remote_worker, worker_variables
from buckeye.workers.worker_side.frames import PROTOCOL, Frame, FrameError, decode, encode, read_body

_CHUNK = 64 * 1024
_MAX_TASKS_BYTES = 2 * 1024**3
_SERIAL_NUMBERS = itertools.count(1)


@dataclass(slots=True)
class _PendingRequest:
    """A request that waits for its response. `pages` are the parts received up to now."""

    response: asyncio.Future[Any]
    pages: list[Any] = field(default_factory=list)
    page_bytes: int = 0


class WorkerProcess:
    """A running worker.

    `fault` is the reason why the worker has ended, or None. After the end, every request raises `fault`.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        settings: WorkerSettings,
        output: WorkerOutput,
        mark: str,
    ) -> None:
        """Wrap a started process.

        Its children inherit the environment variable MARK_VARIABLE with the value `mark`, so that `close`
        finds and kills them.
        """
        self._mark, self._children_killed = mark, asyncio.Future[None]()
        self._process, self._settings, self._output = process, settings, output
        self._reader, self._writer = streams
        self._pending: dict[int, _PendingRequest] = {}
        self._request_ids = itertools.count(1)
        self._hello: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._last_message_at = time.monotonic()
        self._closing = False
        self.serial = next(_SERIAL_NUMBERS)
        """Serial number among all workers of this process."""
        self.blocked_seconds = 0.0
        """Seconds that the worker's event loop was blocked, at the last heartbeat."""
        self.cancelling_count = 0
        """Number of cancelled rollouts that have not ended yet."""
        self.finished_count = 0
        """Number of completed rollouts."""
        self.running_count = 0
        """Number of running rollouts."""
        self.info: dict[str, Any] = {}
        """Description of the environment, from `Adapter.info`."""
        self.fault: WorkerError | None = None
        self.on_end: Callable[[], None] = lambda: None
        tasks = (self._read(), self._read_output(), self._watch())
        self._tasks = [asyncio.create_task(task) for task in tasks]

    @classmethod
    async def start(
        cls,
        python: Path,
        settings: WorkerSettings,
        log: Path | None,
        host_address: tuple[str, int] | None = None,
    ) -> WorkerProcess:
        """Start a worker on this machine or at a worker host, and exchange protocol versions with it.

        Raises WorkerError if the worker does not respond within `start_timeout`.
        """
        mark = GUARD.new_mark()
        if host_address is not None:
            process, connection = await start_remote_worker(python, settings, host_address)
        else:
            variables = worker_variables(settings.variables, settings.address)
            process, connection = await start_process(python, variables | {MARK_VARIABLE: mark})
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        streams = await asyncio.open_connection(sock=connection, limit=1 << 20)
        worker = cls(process, streams, settings, WorkerOutput(log, max_bytes=settings.max_output_bytes), mark)
        try:
            await worker._shake_hands(python)
        except BaseException:
            await worker.close(grace=0.0)
            raise
        return worker

    async def _shake_hands(self, python: Path) -> None:
        self._post({"type": "hello", "protocol": PROTOCOL})
        try:
            async with asyncio.timeout(self._settings.start_timeout):
                hello = await asyncio.shield(self._hello)
        except TimeoutError:
            message = f"{python} did not respond within {self._settings.start_timeout:g} s of its start"
            raise WorkerError("start", self._with_last_output(message)) from None
        if hello.get("protocol") != PROTOCOL:
            raise WorkerError(
                "start", f"the worker has protocol version {hello.get('protocol')}, expected {PROTOCOL}"
            )

    @property
    def pid(self) -> int:
        """Process id, and id of its process group."""
        return self._process.pid

    def last_output(self) -> str:
        """Return the last lines that the worker has printed."""
        return self._output.tail()

    async def request(self, frame: Frame, *, seconds: float, operation: str) -> tuple[Any, list[Any]]:
        """Send a request, and return its response and the pages before it.

        Raises BoundaryError for an error of the environment or the worker, and for a timeout after `seconds`.
        `operation` names the request in messages. A timeout or a cancellation also cancels the request in the
        worker.
        """
        if self.fault is not None:
            raise self.fault
        number = next(self._request_ids)
        pending = _PendingRequest(asyncio.get_running_loop().create_future())
        try:
            encoded = encode({**frame, "id": number})
        except FrameError as error:
            boundary: Boundary = "reset" if frame["type"] == "rollout" else "load"
            raise BoundaryError(
                boundary, "FrameError", f"cannot send the request for {operation}: {error}"
            ) from None
        self._pending[number] = pending
        try:
            async with asyncio.timeout(seconds):
                self._writer.write(encoded)
                await self._drain()
                return await asyncio.shield(pending.response), pending.pages
        except TimeoutError:
            self._cancel_request(number)
            blocked = self.blocked_seconds
            note = f"; the event loop has been blocked for {blocked:.0f} s" if blocked > 1 else ""
            raise BoundaryError(
                "timeout", "TimeoutError", f"{operation} did not end within {seconds:g} s{note}"
            ) from None
        except asyncio.CancelledError:
            self._cancel_request(number)
            raise
        finally:
            if pending.response.done():
                self._pending.pop(number, None)

    async def close(self, *, grace: float | None = None) -> None:
        """Ask the worker to end. After `grace` seconds (None: `close_timeout`), kill it and its children."""
        self._closing = True
        try:
            if self.fault is None:
                self._post({"type": "close"})
                await ends_within(self._process, self._settings.close_timeout if grace is None else grace)
        finally:
            self._end_with(WorkerError("closed", "the worker was closed"))
            for task in self._tasks:
                task.cancel()
            await ends_within(self._process, 5.0)
            await asyncio.wait({self._children_killed}, timeout=5.0)
            await asyncio.wait(self._tasks, timeout=1.0)
            self._output.close()
            self._writer.close()
            self._process._transport.close()  # type: ignore[attr-defined]  # a leaked child may hold the pipe

    # --- messages from the worker ---

    async def _read(self) -> None:
        try:
            while True:
                body = await read_body(self._reader)
                self._receive(decode(body), len(body))
        except (asyncio.IncompleteReadError, ConnectionError):
            await ends_within(self._process, 1.0)
            await asyncio.wait({self._tasks[1]}, timeout=0.5)
            self._end_with(self._end_error())
        except (FrameError, KeyError, TypeError, ValueError) as error:
            message = f"the worker sent an invalid message: {error}"
            self._end_with(WorkerError("protocol", self._with_last_output(message)))

    def _receive(self, frame: Frame, size: int) -> None:
        self._last_message_at = time.monotonic()
        kind = frame["type"]
        if kind == "pong":
            self.blocked_seconds = float(frame["still"])
            return
        if kind == "hello":
            if not self._hello.done():
                self._hello.set_result(frame)
            return
        pending_request = self._pending.get(frame["id"])
        if kind not in ("page", "result", "error"):
            raise FrameError(f"unknown type {kind!r}")
        if pending_request is None or pending_request.response.done():
            return
        if kind == "page":
            pending_request.page_bytes += size
            if pending_request.page_bytes > _MAX_TASKS_BYTES:
                raise FrameError(f"the tasks exceed {_MAX_TASKS_BYTES >> 30} GiB")
            pending_request.pages.append(frame["tasks"])
        elif kind == "result":
            pending_request.response.set_result(frame["value"])
        else:
            _fail(pending_request.response, parse_boundary_error(frame["error"]))

    async def _read_output(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        while chunk := await stream.read(_CHUNK):
            if not self._output.add(chunk):
                max_bytes = self._settings.max_output_bytes
                self._end_with(
                    WorkerError("flooded", f"the worker printed more than {max_bytes:,} bytes in one minute")
                )
                return

    # --- heartbeats and end ---

    async def _watch(self) -> None:
        interval = min(2.0, self._settings.heartbeat_timeout / 4)
        while self.fault is None:
            before = time.monotonic()
            await asyncio.sleep(interval)
            now = time.monotonic()
            # do not count the time while this process was suspended
            self._last_message_at += max(0.0, now - before - interval)
            silent_seconds = now - self._last_message_at if self.info else 0.0  # loading has its own timeout
            if self._process.returncode is not None:
                self._end_with(self._end_error())
            elif silent_seconds > self._settings.heartbeat_timeout:
                self._end_with(
                    WorkerError("silent", f"no heartbeat from the worker for {silent_seconds:.0f} s")
                )
            elif problem := memory_problem(self.pid, self._settings.max_memory_bytes):
                self._end_with(WorkerError("memory", problem))
            else:
                self._post({"type": "ping"})

    def _cancel_request(self, number: int) -> None:
        """Cancel a request in the worker. If the request does not end in time, kill the worker."""
        response = self._pending[number].response
        if self.fault is None and not response.done():
            self.cancelling_count += 1
            self._post({"type": "cancel", "id": number})
            self._tasks.append(asyncio.create_task(self._wait_for_end(number, response)))

    async def _wait_for_end(self, number: int, response: asyncio.Future[Any]) -> None:
        seconds = self._settings.cancel_timeout
        done, _ = await asyncio.wait({response}, timeout=seconds)
        self._pending.pop(number, None)
        self.cancelling_count -= 1
        if done:
            self.finished_count += 1
        else:
            message = f"the worker did not end a cancelled rollout within {seconds:g} s"
            self._end_with(WorkerError("stuck", self._with_last_output(message)))
        self._tasks = [task for task in self._tasks if not task.done()]

    def _end_with(self, fault: WorkerError) -> None:
        """Set the fault, kill the process group, and fail all open requests."""
        if self.fault is not None:
            return
        self.fault = fault
        signal_group(self.pid)
        GUARD.forget(self.pid)
        # children may have left the process group
        self._children_killed = asyncio.get_running_loop().run_in_executor(None, kill_marked, self._mark)
        for response in (self._hello, *(pending.response for pending in self._pending.values())):
            if not response.done():
                _fail(response, fault)
        if not self._closing:
            self.on_end()

    def _end_error(self) -> WorkerError:
        code = self._process.returncode
        if code is None:
            return WorkerError("died", self._with_last_output("the worker closed its connection"))
        if code < 0:
            return WorkerError("killed", self._with_last_output(f"the worker was killed by signal {-code}"))
        return WorkerError("died", self._with_last_output(f"the worker exited with code {code}"))

    def _with_last_output(self, message: str) -> str:
        last = self._output.tail()
        return f"{message}; last output:\n{last}" if last else message

    def _post(self, frame: Frame) -> None:
        if self.fault is None and not self._writer.is_closing():
            self._writer.write(encode(frame))

    async def _drain(self) -> None:
        with contextlib.suppress(ConnectionError):  # `_read` handles a closed connection
            await self._writer.drain()


def _fail(response: asyncio.Future[Any], fault: BoundaryError) -> None:
    response.set_exception(fault)
    response.exception()  # without this, asyncio warns if the caller was cancelled


def memory_problem(pid: int, max_bytes: int | None) -> str | None:
    """Return a message if a worker and its descendants use more memory (RSS) than allowed, else None."""
    used = 0
    with contextlib.suppress(psutil.Error):
        leader = psutil.Process(pid)
        for process in [leader, *leader.children(recursive=True)] if max_bytes is not None else []:
            with contextlib.suppress(psutil.Error):
                used += process.memory_info().rss
    if max_bytes is None or used <= max_bytes:
        return None
    return f"the worker uses {used / 2**20:.0f} MiB; max_memory_gb allows {max_bytes / 2**20:.0f} MiB"
