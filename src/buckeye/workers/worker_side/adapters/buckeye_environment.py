"""Environment written for Buckeye, in a separate interpreter that has Buckeye installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

from ..outcomes import outcome_error_text
from .base import Adapter, AdapterError, Json, failed, raised
from .model import ModelError, chat

GROUP = "buckeye.environments"


def has_entry_point(env_id: str) -> bool:
    """Return True if an installed environment with this id has a Buckeye entry point."""
    name = _canonical(env_id.rsplit("/", 1)[-1].partition("@")[0])
    entries = {_canonical(entry.name) for entry in metadata.entry_points(group=GROUP)}
    return name in entries and importlib.util.find_spec("buckeye") is not None


def is_written_for_buckeye(module: ModuleType) -> bool:
    """Return True if a module without an entry point has a Buckeye environment.

    It must define `load_environment`, and must not have imported verifiers.
    """
    has_loader = callable(getattr(module, "load_environment", None))
    return has_loader and "verifiers" not in sys.modules and importlib.util.find_spec("buckeye") is not None


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


class BuckeyeEnvironment(Adapter):
    """An environment written for Buckeye. Its splits are `train` and `eval`, if they exist."""

    def __init__(self, env_id: str, args: Json) -> None:
        registry = importlib.import_module("buckeye.workers.loading")
        self._base = importlib.import_module("buckeye.envs.base")
        settings = importlib.import_module("buckeye.envs.settings")
        in_process = settings.WorkerSettings(isolation="none")
        self._env = registry.open_environment(env_id, args, in_process)
        if isinstance(self._env, self._base.GroupEnvironment):
            raise AdapterError(
                f"{env_id} scores the rollouts of a task as a group, which worker processes do not support: "
                'set isolation = "none", and remove its worker limits'
            )

    @classmethod
    def of_object(cls, environment: Any) -> BuckeyeEnvironment:
        """Return the adapter of an environment object of this process."""
        adapter = cls.__new__(cls)
        adapter._base = importlib.import_module("buckeye.envs.base")
        adapter._env = environment
        return adapter

    def info(self) -> Json:
        return {
            "name": self._env.name,
            "generation": "buckeye",
            "versions": {"buckeye": importlib.import_module("buckeye").__version__},
            "splits": [split for split in ("train", "eval") if self._has_split(split)],
        }

    def _has_split(self, split: str) -> bool:
        try:
            self._env.tasks(split)
        except KeyError:
            return False
        return True

    def tasks(self, split: str) -> Iterator[Json]:
        tasks = self._env.tasks(split)
        return (
            {"id": task.id, "messages": [dict(m) for m in task.messages], "data": dict(task.data)}
            for task in tasks
        )

    async def rollout(self, task: Json, endpoint: Json, context: Json) -> Json:
        self._base.ROLLOUT_DEADLINE.set(time.monotonic() + context["deadline"])
        own_task = self._base.Task(id=task["id"], messages=tuple(task["messages"]), data=task["data"])
        try:
            outcome = self._env.rollout(own_task, _Policy(self._base, endpoint))
            outcome = await outcome if inspect.isawaitable(outcome) else outcome
        except ModelError as error:
            return raised("model", error)
        except Exception as error:
            return raised("step", error)
        if not isinstance(outcome, self._base.Outcome):
            return failed("score", "OutcomeError", outcome_error_text(outcome, self._env))
        if outcome.error is not None:
            return failed(outcome.boundary or "step", "OutcomeError", str(outcome.error))
        fields = ("reward", "components", "explanations", "stop_reason", "turn_rewards")
        return {name: getattr(outcome, name) for name in fields}

    async def check_isolation(self) -> Json | None:
        """Run the isolation check of the environment; None if it has no such check.

        Returns the report as `result`. If the environment must not be trained, returns the reason as
        `refused` with the error's `code`.
        """
        check = getattr(self._env, "check_isolation", None)
        if check is None:
            return None
        try:
            return {"result": str(await check())}
        except importlib.import_module("buckeye.errors").UsageError as error:
            return {"refused": str(error), "code": error.code}


class _Policy:
    """Model of one rollout, with Buckeye's policy interface."""

    def __init__(self, base: Any, endpoint: Json) -> None:
        self._base = base
        self._endpoint = endpoint

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Any:
        """Return the model's reply. Its text is reasoning and answer, without markers. Raises ModelError."""
        plain_messages = [dict(message) for message in messages]
        reply = await chat(self._endpoint, plain_messages, tools=[dict(tool) for tool in tools])
        reasoning = reply.message.get("reasoning_content") or ""
        return self._base.Reply(
            text=reasoning + reply.text,
            finish_reason="length" if reply.truncated else "stop",
            message=reply.message,
            no_room=reply.no_room,
        )
