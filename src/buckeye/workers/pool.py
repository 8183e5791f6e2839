"""Worker pool of one environment: start workers on demand, and replace workers that end."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from buckeye.envs.settings import WorkerSettings
from buckeye.workers.errors import BoundaryError, WorkerError
from buckeye.workers.process import WorkerProcess

T = TypeVar("T")
log = logging.getLogger(__name__)

_MIN_PAUSE, _MAX_PAUSE = 0.5, 30.0


@dataclass(slots=True)
class _Slot:
    """Slot for one worker. `start_count` is the number of workers that were started in this slot."""

    number: int
    worker: WorkerProcess | None = None
    starting: asyncio.Task[WorkerProcess] | None = None
    start_count: int = 0

    @property
    def running(self) -> WorkerProcess | None:
        """Worker that runs in this slot, or None."""
        return self.worker if self.worker is not None and self.worker.fault is None else None


class WorkerPool:
    """Workers of one environment. All methods run in the worker loop."""

    def __init__(self, env_id: str, args: Mapping[str, Any], python: Path, settings: WorkerSettings) -> None:
        self.env_id, self.python, self.settings = env_id, python, settings
        self._args = dict(args)
        self._slots = [_Slot(number) for number in range(settings.processes)]
        self._failures = 0
        self._next_start = 0.0
        self._last_fault: BoundaryError | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False
        self._is_spread = settings.processes == 1

    async def info(self) -> Any:
        """Return the environment's description, from `Adapter.info`. Raises BoundaryError."""
        return await self._with_retry(self._request_info)

    async def tasks(self, split: str) -> list[dict[str, Any]] | str:
        """Return the tasks of a split, or the reason why the split does not exist. Raises BoundaryError."""
        return await self._with_retry(lambda: self._request_tasks(split))

    async def _with_retry(self, send: Callable[[], Awaitable[T]]) -> T:
        """Call `send`, and retry with another worker after a transient error."""
        for _ in range(self.settings.max_failures - 1):
            try:
                return await send()
            except WorkerError as fault:
                if not fault.is_transient:
                    raise
        return await send()

    async def _request_info(self) -> Any:
        return (await self._worker_at(self._slots[0])).info

    async def _request_tasks(self, split: str) -> list[dict[str, Any]] | str:
        response, pages = await self._ask(
            {"type": "tasks", "split": split}, self.settings.tasks_timeout, f"listing the {split!r} tasks"
        )
        if "missing" in response:
            return str(response["missing"])
        if response.get("note"):
            log.warning("Environment %s: %s", self.env_id, response["note"])
        return [task for page in pages for task in page]

    async def check_isolation(self, seconds: float) -> dict[str, str] | None:
        """Run the environment's isolation check, and return its result; None if the environment has no check.

        Raises BoundaryError if the check fails, or takes longer than `seconds`.
        """
        response, _ = await self._ask({"type": "isolation"}, seconds, "the isolation check")
        return (
            {str(key): str(value) for key, value in response.items()} if isinstance(response, dict) else None
        )

    async def asyncio_tasks(self, seconds: float) -> int:
        """Return the number of asyncio tasks of the first worker, without those of its requests.

        Raises BoundaryError if the worker does not answer within `seconds`.
        """
        response, _ = await self._ask({"type": "asyncio_tasks"}, seconds, "the count of asyncio tasks")
        return int(response)

    async def _ask(self, frame: dict[str, Any], seconds: float, operation: str) -> tuple[Any, list[Any]]:
        """Send a request to the first worker, and return its response and the pages before it."""
        worker = await self._worker_at(self._slots[0])
        return await worker.request(frame, seconds=seconds, operation=operation)

    async def rollout(self, request: Mapping[str, Any], *, slot: int | None) -> tuple[Any, int]:
        """Run a rollout in a given slot, or in the least busy worker.

        Returns the outcome and the serial number of the worker. Raises BoundaryError.
        """
        worker = await (self._least_busy() if slot is None else self._worker_at(self._slots[slot]))
        worker.running_count += 1
        try:
            response, _ = await worker.request(
                {"type": "rollout", **request},
                seconds=self.settings.rollout_timeout + self.settings.cancel_timeout,
                operation="the rollout",
            )
        except BoundaryError as fault:
            if not isinstance(fault, WorkerError) and fault.boundary != "timeout":
                self._record_response(worker)
            raise
        finally:
            worker.running_count -= 1
        self._record_response(worker)
        return response, worker.serial

    async def score_group(self, serial: int, task: Mapping[str, Any], handles: Sequence[str]) -> list[Any]:
        """Return the outcomes of a group of rollouts, which the worker `serial` has run.

        Raises BoundaryError.
        """
        worker = next((w for w in self._workers() if w.serial == serial), None)
        if worker is None:
            raise WorkerError("died", "the worker ended before the group was scored")
        response, _ = await worker.request(
            {"type": "score_group", "task": task, "handles": list(handles)},
            seconds=self.settings.score_timeout,
            operation="scoring the group",
        )
        if not isinstance(response, list) or len(response) != len(handles):
            raise BoundaryError(
                "score",
                "OutcomeError",
                f"`score_group` returned {response!r:.80}, not {len(handles)} outcomes",
            )
        return response

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [worker.pid for worker in self._workers()]

    def slot_of(self, task_id: str) -> int:
        """Return the slot for all rollouts of a task, so that one worker can score them together."""
        return zlib.crc32(task_id.encode()) % len(self._slots)

    async def close(self) -> None:
        """End all workers, including those that are starting."""
        self._closed = True
        starting = [slot.starting for slot in self._slots if slot.starting is not None]
        for start in starting:
            start.cancel()
        closing = [worker.close() for worker in self._workers()]
        await asyncio.gather(*closing, *starting, *self._ending, return_exceptions=True)

    def _workers(self) -> list[WorkerProcess]:
        return [worker for slot in self._slots if (worker := slot.running) is not None]

    # --- starting ---

    async def _least_busy(self) -> WorkerProcess:
        """Start a worker in each empty slot, and return the least busy worker.

        The first rollouts wait until all workers have started, so that every worker gets some of them.
        """
        missing = [self._begin_start(slot) for slot in self._slots if slot.running is None]
        if missing and not (self._is_spread and self._workers()):
            await asyncio.wait(missing)
        self._is_spread = True
        if workers := self._workers():
            return min(workers, key=lambda worker: (worker.cancelling_count, worker.running_count))
        return await _await_start(missing[0])  # raises the reason why the start failed

    async def _worker_at(self, slot: _Slot) -> WorkerProcess:
        return slot.running or await _await_start(self._begin_start(slot))

    def _begin_start(self, slot: _Slot) -> asyncio.Task[WorkerProcess]:
        if slot.starting is None or slot.starting.done():
            slot.starting = asyncio.create_task(self._start(slot))
            slot.starting.add_done_callback(_mark_retrieved)
        return slot.starting

    async def _start(self, slot: _Slot) -> WorkerProcess:
        """Start a worker and load the environment, after a pause if earlier workers have failed."""
        if self._closed:
            raise _closed_error()
        pause = self._next_start - time.monotonic()
        if self._failures >= self.settings.max_failures and pause > 0:
            assert self._last_fault is not None
            raise WorkerError(
                "start",
                f"{self._failures} workers in a row ended before any rollout ended; next start in "
                f"{pause:.0f} s; last error: {self._last_fault.message}",
            )
        await asyncio.sleep(max(0.0, pause))
        nodes = self.settings.nodes or (None,)
        node = nodes[(slot.number + slot.start_count) % len(nodes)]  # a replacement starts on the next node
        slot.start_count += 1
        try:
            worker = await WorkerProcess.start(self.python, self.settings, self._log_of(slot), node)
            worker.on_end = lambda: self._handle_end(slot, worker)
            try:
                await self._load(worker)
            except asyncio.CancelledError:
                await worker.close(grace=0.0)
                raise
        except BoundaryError as fault:
            self._record_failure(fault)
            raise
        slot.worker = worker
        if slot.start_count > 1:
            log.info("environment %s: started a new worker (process %d)", self.env_id, worker.pid)
        return worker

    async def _load(self, worker: WorkerProcess) -> None:
        adapter = None if self.settings.adapter is None else str(self.settings.adapter.absolute())
        context = {"adapter": adapter, "module": self.settings.module}
        request = {"type": "load", "env_id": self.env_id, "args": self._args, "context": context}
        try:
            worker.info, _ = await worker.request(
                request, seconds=self.settings.load_timeout, operation="loading the environment"
            )
        except WorkerError:
            raise
        except BoundaryError as fault:
            await asyncio.sleep(0.1)  # the worker's last output may not have arrived yet
            last = worker.last_output()
            await worker.close(grace=0.0)
            output_note = f"\nlast output:\n{last}" if last else ""
            raise BoundaryError("load", fault.kind, f"{fault.message}{output_note}") from None

    def _log_of(self, slot: _Slot) -> Path | None:
        if self.settings.log_dir is None:
            return None
        number = f"_{slot.number}" if len(self._slots) > 1 else ""
        return self.settings.log_dir / f"{self.settings.log_name}{number}.stdout"

    # --- ending ---

    def _record_response(self, worker: WorkerProcess) -> None:
        worker.finished_count += 1
        self._failures = 0

    def _handle_end(self, slot: _Slot, worker: WorkerProcess) -> None:
        """Record the unexpected end of a worker. The next rollout starts a replacement."""
        fault = worker.fault
        assert fault is not None
        if slot.worker is worker:
            slot.worker = None
            if not worker.finished_count:
                self._record_failure(fault)
            log.warning(
                "environment %s: %s; rollouts lost: %d",
                *(self.env_id, fault.message.partition("; last output:")[0], worker.running_count),
            )
        cleaning = asyncio.create_task(worker.close())
        self._ending.add(cleaning)
        cleaning.add_done_callback(self._ending.discard)

    def _record_failure(self, fault: BoundaryError) -> None:
        self._failures += 1
        self._last_fault = fault
        doublings = min(self._failures - 1, 30)  # a float has a limit
        self._next_start = time.monotonic() + min(_MAX_PAUSE, _MIN_PAUSE * 2.0**doublings)


async def _await_start(starting: asyncio.Task[WorkerProcess]) -> WorkerProcess:
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        if starting.cancelled():
            raise _closed_error() from None
        raise


def _closed_error() -> WorkerError:
    return WorkerError("closed", "the environment was closed")


def _mark_retrieved(starting: asyncio.Task[WorkerProcess]) -> None:
    """Retrieve the exception, so that asyncio logs no warning if no caller waits for this start anymore."""
    if not starting.cancelled():
        starting.exception()
