"""Worker pool of one environment: workers are started on demand and replaced when they end."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from buckeye.envs.settings import WorkerSettings
from buckeye.workers.errors import BoundaryError, WorkerError
from buckeye.workers.process import WorkerProcess

T = TypeVar("T")
log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


@dataclass(slots=True)
class _Place:
    """Slot for one worker. `lives` counts the workers that have used it."""

    number: int
    worker: WorkerProcess | None = None
    starting: asyncio.Task[WorkerProcess] | None = None
    lives: int = 0


class WorkerPool:
    """Workers of one environment. All methods run in the hub's event loop."""

    def __init__(self, env_id: str, args: Mapping[str, Any], python: Path, settings: WorkerSettings) -> None:
        self.env_id, self.python, self.settings = env_id, python, settings
        self._args = dict(args)
        self._places = [_Place(number) for number in range(settings.processes)]
        self._failures = 0
        self._not_before = 0.0
        self._last_fault: BoundaryError | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False
        self._spread = settings.processes == 1
        self.ended: Counter[str] = Counter()
        """Number of unexpected ends of workers by kind: `died`, `silent`, `stuck`, ..."""

    async def info(self) -> Any:
        """Return the environment's description. Raises Fault."""
        return await self._by_some_worker(self._info)

    async def tasks(self, split: str) -> list[dict[str, Any]] | str:
        """Return the tasks of a split, or the reason why the split does not exist. Raises Fault."""
        return await self._by_some_worker(lambda: self._ask_for_tasks(split))

    async def _by_some_worker(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Call `ask`, and retry with another worker if the first ended by chance."""
        for _ in range(self.settings.max_failures - 1):
            try:
                return await ask()
            except WorkerError as fault:
                if not fault.is_transient:
                    raise
        return await ask()

    async def _info(self) -> Any:
        return (await self._worker_at(self._places[0])).info

    async def _ask_for_tasks(self, split: str) -> list[dict[str, Any]] | str:
        worker = await self._worker_at(self._places[0])
        answer, pages = await worker.ask(
            {"type": "tasks", "split": split},
            seconds=self.settings.tasks_timeout,
            what=f"the tasks of {split!r}",
        )
        if "missing" in answer:
            return str(answer["missing"])
        return [task for page in pages for task in page]

    async def check_isolation(self, seconds: float) -> dict[str, str] | None:
        """Return the environment's own check if rollouts share state; None if it has no such check.

        Raises Fault, also after `seconds`.
        """
        worker = await self._worker_at(self._places[0])
        what = "whether rollouts see each other"
        answer, _ = await worker.ask({"type": "isolation"}, seconds=seconds, what=what)
        return {str(key): str(value) for key, value in answer.items()} if isinstance(answer, dict) else None

    async def rollout(self, question: Mapping[str, Any], *, slot: int | None) -> tuple[Any, int]:
        """Run a rollout in a given slot, or in the least busy worker.

        Returns the outcome and the serial number of the worker. Raises Fault.
        """
        worker = await (self._least_busy() if slot is None else self._worker_at(self._places[slot]))
        worker.running_count += 1
        try:
            answer, _ = await worker.ask(
                {"type": "rollout", **question},
                seconds=self.settings.rollout_timeout + self.settings.cancel_timeout,
                what="the outcome",
            )
        except BoundaryError as fault:
            if not isinstance(fault, WorkerError) and fault.boundary != "timeout":
                self._has_answered(worker)
            raise
        finally:
            worker.running_count -= 1
        self._has_answered(worker)
        return answer, worker.serial

    async def score_group(self, serial: int, task: Mapping[str, Any], handles: Sequence[str]) -> list[Any]:
        """Return the outcomes of rollouts that the worker with this serial number has run. Raises Fault."""
        worker = next((w for w in self._workers() if w.serial == serial), None)
        if worker is None:
            raise WorkerError("died", "the worker ended before the group was scored")
        answer, _ = await worker.ask(
            {"type": "score_group", "task": task, "handles": list(handles)},
            seconds=self.settings.score_timeout,
            what="the group's rewards",
        )
        if not isinstance(answer, list) or len(answer) != len(handles):
            raise BoundaryError(
                "score", "OutcomeError", f"{len(handles)} rollouts were to be scored, not {answer!r:.80}"
            )
        return answer

    async def release(self, serial: int, handle: str) -> None:
        """Release a rollout that a worker keeps for its group."""
        for worker in self._workers():
            if worker.serial == serial:
                worker.post_release([handle])

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [worker.pid for worker in self._workers()]

    def slot_of(self, task_id: str) -> int:
        """Return the slot for all rollouts of a task, so that one worker can score them together."""
        return zlib.crc32(task_id.encode()) % len(self._places)

    async def close(self) -> None:
        """End all workers, including those that are starting."""
        self._closed = True
        starting = [slot.starting for slot in self._places if slot.starting is not None]
        for start in starting:
            start.cancel()
        closing = [worker.close() for worker in self._workers()]
        await asyncio.gather(*closing, *starting, *self._ending, return_exceptions=True)

    def _workers(self) -> list[WorkerProcess]:
        workers = [slot.worker for slot in self._places]
        return [worker for worker in workers if worker is not None and worker.fault is None]

    # --- starting ---

    async def _least_busy(self) -> WorkerProcess:
        """Start missing workers, and return the least busy running one.

        The first rollouts wait for all workers, to be spread over them.
        """
        missing = [self._starting(slot) for slot in self._places if not _is_up(slot)]
        if missing and not (self._spread and self._workers()):
            await asyncio.wait(missing)
        self._spread = True
        if workers := self._workers():
            return min(workers, key=lambda worker: (worker.cancelling_count, worker.running_count))
        return await _started(missing[0])  # the start has failed; this raises its reason

    async def _worker_at(self, slot: _Place) -> WorkerProcess:
        if slot.worker is not None and slot.worker.fault is None:
            return slot.worker
        return await _started(self._starting(slot))

    def _starting(self, slot: _Place) -> asyncio.Task[WorkerProcess]:
        if slot.starting is None or slot.starting.done():
            slot.starting = asyncio.create_task(self._start(slot))
            slot.starting.add_done_callback(_retrieved)
        return slot.starting

    async def _start(self, slot: _Place) -> WorkerProcess:
        """Start a worker and load the environment, after a pause if earlier workers have failed."""
        if self._closed:
            raise _closed()
        pause = self._not_before - time.monotonic()
        if self._failures >= self.settings.max_failures and pause > 0:
            assert self._last_fault is not None
            raise WorkerError(
                "start",
                f"{self._failures} workers in a row have ended before a rollout did, the next starts in "
                f"{pause:.0f} s; the last: {self._last_fault.message}",
            )
        await asyncio.sleep(max(0.0, pause))
        nodes = self.settings.nodes or (None,)
        where = nodes[(slot.number + slot.lives) % len(nodes)]  # another node than that of a lost worker
        slot.lives += 1
        try:
            worker = await WorkerProcess.start(self.python, self.settings, self._log_of(slot), where)
            worker.on_end = lambda: self._has_ended(slot, worker)
            try:
                await self._load(worker)
            except asyncio.CancelledError:
                await worker.close(grace=0.0)
                raise
        except BoundaryError as fault:
            self._has_failed(fault)
            raise
        slot.worker = worker
        if slot.lives > 1:
            log.info("environment %s has a new worker (process %d)", self.env_id, worker.pid)
        return worker

    async def _load(self, worker: WorkerProcess) -> None:
        adapter = None if self.settings.adapter is None else str(self.settings.adapter.absolute())
        context = {"adapter": adapter, "module": self.settings.module}
        question = {"type": "load", "env_id": self.env_id, "args": self._args, "context": context}
        try:
            worker.info, _ = await worker.ask(
                question, seconds=self.settings.load_timeout, what="the loaded environment"
            )
        except WorkerError:
            raise
        except BoundaryError as fault:
            await asyncio.sleep(0.1)  # its last output may still be on the way
            last = worker.last_output()
            await worker.close(grace=0.0)
            shown = f"\nIts last lines:\n{last}" if last else ""
            raise BoundaryError("load", fault.kind, f"{fault.message}{shown}") from None

    def _log_of(self, slot: _Place) -> Path | None:
        if self.settings.log_dir is None:
            return None
        number = f"_{slot.number}" if len(self._places) > 1 else ""
        return self.settings.log_dir / f"{self.settings.log_name}{number}.stdout"

    # --- ending ---

    def _has_answered(self, worker: WorkerProcess) -> None:
        worker.finished_count += 1
        self._failures = 0

    def _has_ended(self, slot: _Place, worker: WorkerProcess) -> None:
        """Handle the unexpected end of a worker. The next rollout starts another."""
        fault = worker.fault
        assert fault is not None
        self.ended[fault.kind] += 1
        if slot.worker is worker:
            slot.worker = None
            if not worker.finished_count:
                self._has_failed(fault)
            log.warning(
                "environment %s: %s; rollouts that were played there and are errors: %d",
                *(self.env_id, fault.message.partition("; its last lines:")[0], worker.running_count),
            )
        cleaning = asyncio.create_task(worker.close())
        self._ending.add(cleaning)
        cleaning.add_done_callback(self._ending.discard)

    def _has_failed(self, fault: BoundaryError) -> None:
        self._failures += 1
        self._last_fault = fault
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (self._failures - 1))
        self._not_before = time.monotonic() + pause


async def _started(starting: asyncio.Task[WorkerProcess]) -> WorkerProcess:
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        if starting.cancelled():
            raise _closed() from None
        raise


def _closed() -> WorkerError:
    return WorkerError("closed", "the environment was closed")


def _is_up(slot: _Place) -> bool:
    return slot.worker is not None and slot.worker.fault is None


def _retrieved(starting: asyncio.Task[WorkerProcess]) -> None:
    """Mark the exception as retrieved, because possibly no caller waits for this start anymore."""
    if not starting.cancelled():
        starting.exception()
