"""An environment written for Buckeye, in an interpreter of its own that has Buckeye installed."""

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

from ..outcomes import no_outcome
from .base import Adapter, AdapterError, Json, failed, raised
from .model import ModelError, chat

GROUP = "buckeye.environments"


def announces(env_id: str) -> bool:
    """Whether an installed environment of Buckeye has this id."""
    name = _canonical(env_id.rsplit("/", 1)[-1].partition("@")[0])
    entries = {_canonical(entry.name) for entry in metadata.entry_points(group=GROUP)}
    return name in entries and importlib.util.find_spec("buckeye") is not None


def is_written_for_buckeye(module: ModuleType) -> bool:
    """Whether a module that does not announce itself has an environment of Buckeye: it offers to load one,
    and does so without verifiers."""
    offers = callable(getattr(module, "load_environment", None))
    return offers and "verifiers" not in sys.modules and importlib.util.find_spec("buckeye") is not None


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


class BuckeyeEnvironment(Adapter):
    """The splits are those of train and eval that it has."""

    def __init__(self, env_id: str, args: Json) -> None:
        registry = importlib.import_module("buckeye.workers.opening")
        self._base = importlib.import_module("buckeye.envs.base")
        settings = importlib.import_module("buckeye.envs.settings")
        here = settings.WorkerSettings(isolation="none")
        self._env = registry.open_environment(env_id, args, here)
        if isinstance(self._env, self._base.GroupEnvironment):
            raise AdapterError(
                f"{env_id} scores the rollouts of a task together, which it can only do in the process that "
                'plays: set isolation = "none", and no limits that workers keep'
            )

    def info(self) -> Json:
        return {
            "name": self._env.name,
            "generation": "buckeye",
            "versions": {"buckeye": importlib.import_module("buckeye").__version__},
            "splits": [split for split in ("train", "eval") if self._has(split)],
        }

    def _has(self, split: str) -> bool:
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
        self._base.ROLLOUT_ENDS.set(time.monotonic() + context["deadline"])
        played = self._base.Task(id=task["id"], messages=tuple(task["messages"]), data=task["data"])
        try:
            outcome = self._env.rollout(played, _Policy(self._base, endpoint))
            outcome = await outcome if inspect.isawaitable(outcome) else outcome
        except ModelError as error:
            return raised("model", error)
        except Exception as error:
            return raised("step", error)
        if not isinstance(outcome, self._base.Outcome):
            return failed("score", "OutcomeError", no_outcome(outcome, self._env))
        if outcome.error is not None:
            return failed(outcome.boundary or "step", "OutcomeError", str(outcome.error))
        fields = ("reward", "components", "explanations", "stop_reason", "turn_rewards")
        return {name: getattr(outcome, name) for name in fields}

    async def check_isolation(self) -> Json | None:
        """What comes of its own look at whether rollouts see each other: what it `said`, or why they must not
        be trained on (`refused`). None if it cannot tell."""
        check = getattr(self._env, "check_isolation", None)
        if check is None:
            return None
        try:
            return {"said": str(await check())}
        except importlib.import_module("buckeye.errors").UsageError as error:
            return {"refused": str(error)}


class _Policy:
    """The model of one rollout, as an environment of Buckeye asks it."""

    def __init__(self, base: Any, endpoint: Json) -> None:
        self._base = base
        self._endpoint = endpoint

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Any:
        """The reply. Its text is the reasoning and the answer, without the marks between them. Raises
        ModelError."""
        told = [dict(message) for message in messages]
        reply = await chat(self._endpoint, told, tools=[dict(tool) for tool in tools])
        reasoning = reply.message.get("reasoning_content") or ""
        return self._base.Reply(
            text=reasoning + reply.text,
            finish_reason="length" if reply.truncated else "stop",
            message=reply.message,
            no_room=reply.no_room,
        )
