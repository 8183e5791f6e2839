"""Environment that runs in worker processes, with the interface of an ordinary environment."""

from __future__ import annotations

import math
import weakref
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from buckeye.base.process import remove_secrets
from buckeye.envs.base import Outcome, Policy, Task
from buckeye.envs.outcome_validation import missing_variable_hint
from buckeye.envs.settings import WorkerSettings
from buckeye.envs.stdlib_only.outcomes import OutcomeError, checked_outcome
from buckeye.errors import BuckeyeError, UsageError
from buckeye.workers.errors import BoundaryError, WorkerError, parse_boundary_error
from buckeye.workers.pool import WorkerPool
from buckeye.workers.proxy import Endpoint, Limits, Usage, serve
from buckeye.workers.worker_loop import worker_loop

_COUNT_SECONDS = 5.0
_ISOLATION_SECONDS = 120.0  # 30 s to check tools, 20 s to compare rollouts, the rest to start and end servers
_USER_ERRORS = ("AdapterError", "UsageError")  # their messages have the problem and the fix


def open_worker_environment(
    env_id: str, args: Mapping[str, Any], python: Path, settings: WorkerSettings
) -> WorkerEnvironment:
    """Load an environment in a worker process of the interpreter `python`.

    Raises UsageError, with the environment's message, if the environment fails to load. Raises BuckeyeError
    if its workers are repeatedly killed or stop sending heartbeats.
    """
    pool = WorkerPool(env_id, args, python, settings)
    try:
        info = _checked_info(worker_loop().wait(pool.info()))
    except BoundaryError as fault:
        worker_loop().wait(pool.close())
        message = (
            f"cannot load environment {env_id!r} in {python} with {dict(args) or 'no arguments'}: {fault}"
        )
        if fault.kind in _USER_ERRORS:
            message = f"environment {env_id!r}: {fault.message}"
        hint = missing_variable_hint(str(fault), settings.variables) or None
        raise _to_error(fault, message, code="BK-ENV-LOAD", hint=hint) from None
    except BaseException:
        worker_loop().wait(pool.close())
        raise
    return GroupWorkerEnvironment(pool, info) if info["group_rewards"] else WorkerEnvironment(pool, info)


class WorkerEnvironment:
    """Environment that runs its rollouts in worker processes, which call the policy through HTTP."""

    def __init__(self, pool: WorkerPool, info: Mapping[str, Any]) -> None:
        self.name: str = info["name"]
        self.splits: tuple[str, ...] = tuple(info["splits"])
        self.turns: int | None = info.get("turns")
        self.judged: tuple[str, ...] = tuple(info.get("judged", ()))
        self._pool = pool
        self._tasks: dict[str, tuple[Task, ...]] = {}
        self._finalizer = weakref.finalize(self, worker_loop().register(pool))
        self._finalizer.atexit = False  # at exit, the worker loop closes all pools and waits for them

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split. The first call fetches them from a worker.

        Raises KeyError for an unknown split, UsageError if the environment fails, and BuckeyeError if its
        workers are repeatedly killed.
        """
        if split not in self._tasks:
            try:
                rows = worker_loop().wait(self._pool.tasks(split))
            except BoundaryError as fault:
                message = f"cannot get the {split!r} tasks of environment {self.name}: {fault}"
                raise _to_error(fault, message, code="BK-ENV-TASKS") from None
            if isinstance(rows, str):
                raise KeyError(f"{self.name} has no split {split!r}: {rows}")
            self._tasks[split] = tuple(
                Task(id=task["id"], messages=tuple(task["messages"]), data=task.get("data", {}))
                for task in rows
            )
        return self._tasks[split]

    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        """Run one rollout.

        If rewards depend on the group, score this rollout as the only one of its group.
        """
        return await self._run_rollout(task, policy, in_group=False)

    async def check_isolation(self) -> str:
        """Check in a worker if rollouts share state, and return a one-line report.

        Raises UsageError if rollouts share state and the environment does not allow shared state.
        """
        try:
            report = await worker_loop().run(self._pool.check_isolation(_ISOLATION_SECONDS))
        except BoundaryError as fault:
            return f"isolation of rollouts unknown: {fault}"
        if report is None:
            return "isolation of rollouts not checked: the environment has no MCP servers"
        if "refused" in report:
            raise UsageError(report["refused"], code=report.get("code", "BK-ENV-UNSUPPORTED"))
        return report.get("result", "")

    async def asyncio_tasks(self) -> int:
        """Return the number of asyncio tasks that rollouts left in the first worker. Raises BoundaryError."""
        return await worker_loop().run(self._pool.asyncio_tasks(_COUNT_SECONDS))

    def workers(self) -> list[int]:
        """Return the process ids of the running workers."""
        return self._pool.pids()

    async def close(self) -> None:
        """End the workers.

        Without this call, workers end when this object is deleted or this process ends.
        """
        self._finalizer.detach()
        worker_loop().unregister(self._pool)
        await worker_loop().run(self._pool.close())

    async def _run_rollout(self, task: Task, policy: Policy, *, in_group: bool) -> Outcome:
        settings = self._pool.settings
        limits = Limits(
            max_turns=settings.max_turns, max_tokens=settings.max_tokens, seconds=settings.rollout_timeout
        )
        async with serve(policy, limits=limits, environment=self.name, host=settings.address) as endpoint:
            request = {
                "task": _task_values(task),
                "endpoint": _endpoint_values(endpoint, settings),
                "context": {
                    "rollout": endpoint.root_url.rpartition("/")[2],
                    "seed": zlib.crc32(task.id.encode()),
                    "deadline": settings.rollout_timeout,
                    "max_turns": settings.max_turns,
                    "keep_for_group": in_group,
                },
            }
            slot = self._pool.slot_of(task.id) if in_group else None
            try:
                response, serial = await worker_loop().run(self._pool.rollout(request, slot=slot))
                outcome = _to_outcome(response, serial)
                if outcome.pending is not None and not in_group:
                    raise BoundaryError(
                        "score", "OutcomeError", "the outcome has neither a reward nor an error"
                    )
            except BoundaryError as fault:
                outcome = _failed_outcome(fault, settings.variables, endpoint.api_key)
        return _with_usage(outcome, endpoint.usage)


class GroupWorkerEnvironment(WorkerEnvironment):
    """Environment whose rewards depend on the other rollouts of the same task."""

    async def rollout_in_group(self, task: Task, policy: Policy) -> Outcome:
        """Run one rollout. Unless it fails, its outcome is `pending` until `finish_group` adds the reward."""
        return await self._run_rollout(task, policy, in_group=True)

    async def finish_group(self, task: Task, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """Return the outcomes with their rewards, in the given order.

        If a worker has ended, its outcomes become errors, and the other outcomes are scored without them.
        """
        finished = list(outcomes)
        indices_by_worker: dict[int, list[int]] = defaultdict(list)
        for index, outcome in enumerate(outcomes):
            if outcome.pending is not None:
                indices_by_worker[int(outcome.pending.partition("/")[0])].append(index)
        for serial, indices in indices_by_worker.items():
            scored = await self._score(task, serial, [outcomes[index] for index in indices])
            for index, outcome in zip(indices, scored, strict=True):
                finished[index] = outcome
        return finished

    async def _score(self, task: Task, serial: int, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        handles = [str(outcome.pending).partition("/")[2] for outcome in outcomes]
        try:
            responses = await worker_loop().run(self._pool.score_group(serial, _task_values(task), handles))
            scored = [_to_outcome(response, serial) for response in responses]
            if any(outcome.pending is not None for outcome in scored):
                raise BoundaryError(
                    "score", "OutcomeError", "`score_group` returned outcomes without rewards"
                )
        except BoundaryError as fault:
            return [_failed_outcome(fault, self._pool.settings.variables)] * len(outcomes)
        return [
            outcome if before.stop_reason == "done" else replace(outcome, stop_reason=before.stop_reason)
            for before, outcome in zip(outcomes, scored, strict=True)
        ]


def _checked_info(info: Any) -> dict[str, Any]:
    """Return `info` with defaults for missing fields. Raises BoundaryError if `info` is invalid."""
    if not isinstance(info, dict) or not isinstance(info.get("name"), str):
        raise BoundaryError("load", "InfoError", f"the adapter's description has no name: {info!r:.200}")
    splits = info.get("splits") or []
    if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
        raise BoundaryError("load", "InfoError", f"`splits` is {splits!r:.200}, not a list of names")
    return {**info, "splits": splits, "group_rewards": bool(info.get("group_rewards", False))}


def _task_values(task: Task) -> dict[str, Any]:
    return {"id": task.id, "messages": [dict(message) for message in task.messages], "data": dict(task.data)}


def _endpoint_values(endpoint: Endpoint, settings: WorkerSettings) -> dict[str, Any]:
    return {
        "base_url": endpoint.base_url,
        "root_url": endpoint.root_url,
        "api_key": endpoint.api_key,
        "model": endpoint.model,
        "sampling": dict(settings.sampling),
    }


def _to_outcome(response: Any, serial: int) -> Outcome:
    """Return a worker's response as an outcome. Raises BoundaryError if it is invalid."""
    try:
        values = checked_outcome(response)
        if error := values["error"]:
            raise parse_boundary_error(error)
        pending = None if values["handle"] is None else f"{serial}/{values['handle']}"
        return Outcome(
            reward=values["reward"] if pending is None else None,
            components=values["components"],
            explanations=values["explanations"],
            stop_reason=values["stop_reason"],
            turn_rewards=values["turn_rewards"],
            pending=pending,
        )
    except (OutcomeError, ValueError) as error:
        raise BoundaryError("score", type(error).__name__, str(error)) from None


def _to_error(fault: BoundaryError, message: str, *, code: str, hint: str | None = None) -> BuckeyeError:
    """Return the exception to raise for a fault: BuckeyeError if a retry may help, else UsageError."""
    if not isinstance(fault, WorkerError):
        return UsageError(message, code=code, hint=hint)
    kind = BuckeyeError if fault.is_transient else UsageError
    return kind(message, code="BK-ENV-WORKER", hint=hint)


def _failed_outcome(fault: BoundaryError, variables: Sequence[str], *secrets: str) -> Outcome:
    hint = missing_variable_hint(str(fault), variables)
    return Outcome(
        reward=None,
        stop_reason="timeout" if fault.boundary == "timeout" else "error",
        error=remove_secrets(f"{fault}. {hint}" if hint else str(fault), secrets),
        boundary=fault.boundary,
        trace=fault.trace,
    )


def _with_usage(outcome: Outcome, usage: Usage) -> Outcome:
    """Return the outcome, corrected by the usage that the proxy recorded.

    If the model failed, the outcome becomes an error. If the rollout reached a limit, the limit becomes its
    stop reason.
    """
    if usage.failure is not None:
        error = f"model: {usage.failure}"
        return Outcome(reward=None, stop_reason="error", error=error, boundary="model")
    if usage.stop_reason is None:
        return outcome
    turn_rewards = outcome.turn_rewards
    if turn_rewards is not None and 0 < usage.turns < len(turn_rewards):
        # calls that the limit refused are not turns: add their rewards to the last turn
        last = math.fsum(turn_rewards[usage.turns - 1 :])
        turn_rewards = [*turn_rewards[: usage.turns - 1], last]
    return replace(outcome, stop_reason=usage.stop_reason, turn_rewards=turn_rewards)
