"""One worker process, as the hub sees it: requests, answers, heartbeats and its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from buckeye.base.process import ends_within
from buckeye.base.process_guard import GUARD, MARK_VARIABLE, kill_marked
from buckeye.envs.base import Boundary
from buckeye.envs.settings import WorkerSettings
from buckeye.workers.errors import BoundaryError, WorkerError, parse_boundary_error
from buckeye.workers.output import WorkerOutput
from buckeye.workers.process_start import start_process, start_remote_worker, worker_variables
from buckeye.workers.worker_side.frames import (
    HEADER,
    PROTOCOL,
    Frame,
    FrameError,
    body_length,
    decode,
    encode,
)

_CHUNK = 64 * 1024
_MAX_TASKS_BYTES = 2 * 1024**3
_SERIALS = itertools.count(1)


@dataclass(slots=True)
class _Question:
    """A request that waits for its answer. `pages` are the parts received up to now."""

    answer: asyncio.Future[Any]
    pages: list[Any] = field(default_factory=list)
    page_bytes: int = 0


class WorkerProcess:
    """A running worker.

    `fault` is set once it has ended or had to be ended. All requests then fail with it.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        settings: WorkerSettings,
        output: WorkerOutput,
        mark: str,
    ) -> None:
        """Wrap a started process. `mark` identifies its children: it is in their environment."""
        self._mark, self._cleared = mark, asyncio.Future[None]()
        self._process, self._settings, self._output = process, settings, output
        self._reader, self._writer = streams
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count(1)
        self._hello: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._heard = time.monotonic()
        self._closing = False
        self.serial = next(_SERIALS)
        """Serial number among all workers of this process."""
        self.still = 0.0
        """Seconds that the worker's event loop was blocked, at the last heartbeat."""
        self.cancelling_count = 0
        """Number of cancelled rollouts that have not ended yet."""
        self.finished_count = 0
        """Number of completed rollouts."""
        self.running_count = 0
        """Number of running rollouts."""
        self.info: dict[str, Any] = {}
        """Description of its environment."""
        self.fault: WorkerError | None = None
        self.on_end: Callable[[], None] = lambda: None
        tasks = (self._read(), self._keep_output(), self._watch())
        self._tasks = [asyncio.create_task(task) for task in tasks]

    @classmethod
    async def start(
        cls,
        python: Path,
        settings: WorkerSettings,
        log: Path | None,
        host_address: tuple[str, int] | None = None,
    ) -> WorkerProcess:
        """Start a worker on this machine or at a worker host, and shake hands with it.

        Raises WorkerFault if it does not answer in time.
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
            what = f"{python} did not answer within {self._settings.start_timeout:g} s of its start"
            raise WorkerError("start", self._with_last_words(what)) from None
        if hello.get("protocol") != PROTOCOL:
            raise WorkerError("start", f"it speaks protocol {hello.get('protocol')}, not {PROTOCOL}")

    @property
    def pid(self) -> int:
        """Process id, and id of its process group."""
        return self._process.pid

    def last_output(self) -> str:
        """Return its last output."""
        return self._output.tail()

    async def ask(self, question: Frame, *, seconds: float, what: str) -> tuple[Any, list[Any]]:
        """Send a request, and return its answer and the pages before it.

        Raises Fault: an error of the environment or the worker, or a timeout after `seconds`; `what` names
        the expected answer. A timeout or a cancellation also cancels the request in the worker.
        """
        if self.fault is not None:
            raise self.fault
        number = next(self._numbers)
        waiting = _Question(asyncio.get_running_loop().create_future())
        try:
            frame = encode({**question, "id": number})
        except FrameError as error:
            boundary: Boundary = "reset" if question["type"] == "rollout" else "load"
            raise BoundaryError(boundary, "FrameError", f"{what} cannot be asked for: {error}") from None
        self._questions[number] = waiting
        try:
            async with asyncio.timeout(seconds):
                self._writer.write(frame)
                await self._drain()
                return await asyncio.shield(waiting.answer), waiting.pages
        except TimeoutError:
            self._take_back(number)
            stood = f"; its event loop has stood still for {self.still:.0f} s" if self.still > 1 else ""
            raise BoundaryError(
                "timeout", "TimeoutError", f"{what} has not come within {seconds:g} s{stood}"
            ) from None
        except asyncio.CancelledError:
            self._take_back(number)
            raise
        finally:
            if waiting.answer.done():
                self._questions.pop(number, None)

    def post_release(self, handles: list[str]) -> None:
        """Tell the worker that these rollouts will not be scored as a group."""
        self._post({"type": "release", "handles": handles})

    async def close(self, *, grace: float | None = None) -> None:
        """Ask the worker to end, wait `grace` seconds (None: the setting), then kill it with its children."""
        self._closing = True
        try:
            if self.fault is None:
                self._post({"type": "close"})
                await ends_within(self._process, self._settings.close_timeout if grace is None else grace)
        finally:
            self._break(WorkerError("closed", "the worker was closed"))
            for task in self._tasks:
                task.cancel()
            await ends_within(self._process, 5.0)
            await asyncio.wait({self._cleared}, timeout=5.0)
            await asyncio.wait(self._tasks, timeout=1.0)
            self._output.close()
            self._writer.close()
            self._process._transport.close()  # type: ignore[attr-defined]  # a leaked child may hold the pipe

    # --- what it sends ---

    async def _read(self) -> None:
        try:
            while True:
                body = await self._reader.readexactly(
                    body_length(await self._reader.readexactly(HEADER.size))
                )
                self._receive(decode(body), len(body))
        except (asyncio.IncompleteReadError, ConnectionError):
            await ends_within(self._process, 1.0)
            await asyncio.wait({self._tasks[1]}, timeout=0.5)
            self._break(self._its_end())
        except (FrameError, KeyError, TypeError, ValueError) as error:
            what = f"the worker sent something that is no message ({error})"
            self._break(WorkerError("protocol", self._with_last_words(what)))

    def _receive(self, frame: Frame, size: int) -> None:
        self._heard = time.monotonic()
        kind = frame["type"]
        if kind == "pong":
            self.still = float(frame["still"])
            return
        if kind == "hello":
            if not self._hello.done():
                self._hello.set_result(frame)
            return
        question = self._questions.get(frame["id"])
        if kind not in ("page", "result", "error"):
            raise FrameError(f"of the type {kind!r}")
        if question is None or question.answer.done():
            return
        if kind == "page":
            question.page_bytes += size
            if question.page_bytes > _MAX_TASKS_BYTES:
                raise FrameError(f"tasks of more than {_MAX_TASKS_BYTES >> 30} GiB")
            question.pages.append(frame["tasks"])
        elif kind == "result":
            question.answer.set_result(frame["value"])
        else:
            _fail(question.answer, parse_boundary_error(frame["error"]))

    async def _keep_output(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        while chunk := await stream.read(_CHUNK):
            if not self._output.add(chunk):
                max_bytes = self._settings.max_output_bytes
                self._break(
                    WorkerError("flooded", f"the worker printed more than {max_bytes} bytes in a minute")
                )
                return

    # --- its life ---

    async def _watch(self) -> None:
        interval = min(2.0, self._settings.heartbeat_timeout / 4)
        while self.fault is None:
            slept = time.monotonic()
            await asyncio.sleep(interval)
            now = time.monotonic()
            self._heard += max(0.0, now - slept - interval)  # this process may have been paused meanwhile
            silent = now - self._heard if self.info else 0.0  # loading has its own timeout
            if self._process.returncode is not None:
                self._break(self._its_end())
            elif silent > self._settings.heartbeat_timeout:
                self._break(WorkerError("silent", f"the worker has given no sign of life for {silent:.0f} s"))
            elif over := self._over_memory():
                self._break(WorkerError("memory", over))
            else:
                self._post({"type": "ping"})

    def _over_memory(self) -> str | None:
        max_bytes = self._settings.max_memory_bytes
        if max_bytes is None:
            return None
        used = memory_of(self.pid)
        if used <= max_bytes:
            return None
        return f"the worker has grown to {used / 2**20:.0f} MiB; max_memory_gb allows {max_bytes / 2**20:.0f} MiB"

    def _take_back(self, number: int) -> None:
        """Cancel a request in the worker. If it does not end in time, the worker is replaced."""
        answer = self._questions[number].answer
        if self.fault is None and not answer.done():
            self.cancelling_count += 1
            self._post({"type": "cancel", "id": number})
            self._tasks.append(asyncio.create_task(self._wait_for_end(number, answer)))

    async def _wait_for_end(self, number: int, answer: asyncio.Future[Any]) -> None:
        seconds = self._settings.cancel_timeout
        done, _ = await asyncio.wait({answer}, timeout=seconds)
        self._questions.pop(number, None)
        self.cancelling_count -= 1
        if done:
            self.finished_count += 1
        else:
            what = f"the worker did not end a cancelled rollout within {seconds:g} s"
            self._break(WorkerError("stuck", self._with_last_words(what)))
        self._tasks = [task for task in self._tasks if not task.done()]

    def _break(self, fault: WorkerError) -> None:
        """Set the fault, kill the process group, and fail all open requests."""
        if self.fault is not None:
            return
        self.fault = fault
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        GUARD.forget(self.pid)
        # children may have left the process group
        self._cleared = asyncio.get_running_loop().run_in_executor(None, kill_marked, self._mark)
        for answer in (self._hello, *(question.answer for question in self._questions.values())):
            if not answer.done():
                _fail(answer, fault)
        if not self._closing:
            self.on_end()

    def _its_end(self) -> WorkerError:
        code = self._process.returncode
        if code is None:
            return WorkerError("died", self._with_last_words("the worker closed its connection"))
        if code < 0:
            return WorkerError("killed", self._with_last_words(f"the worker was ended by signal {-code}"))
        return WorkerError("died", self._with_last_words(f"the worker ended with exit code {code}"))

    def _with_last_words(self, what: str) -> str:
        last = self._output.tail()
        return f"{what}; its last lines:\n{last}" if last else what

    def _post(self, frame: Frame) -> None:
        if self.fault is None and not self._writer.is_closing():
            self._writer.write(encode(frame))

    async def _drain(self) -> None:
        with contextlib.suppress(ConnectionError):  # the reader notices the end
            await self._writer.drain()


def _fail(answer: asyncio.Future[Any], fault: BoundaryError) -> None:
    answer.set_exception(fault)
    answer.exception()  # marks the exception as retrieved; the caller may have gone


def memory_of(pid: int) -> int:
    """Return the resident memory (RSS) of a process and its descendants in bytes; 0 if it has ended."""
    try:
        leader = psutil.Process(pid)
        family = [leader, *leader.children(recursive=True)]
    except psutil.Error:
        return 0
    used = 0
    for process in family:
        with contextlib.suppress(psutil.Error):
            used += process.memory_info().rss
    return used
