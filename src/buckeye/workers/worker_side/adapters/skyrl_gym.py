"""Adapter for environments of `skyrl-gym`, whose tasks are rows of files in JSON Lines.

A row is a row of SkyRL's datasets: its `prompt` and the other fields that the environment reads, such as
`reward_spec`. The environment's observations extend the conversation. The reward is the sum of all steps.
"""

from __future__ import annotations

import asyncio
import importlib
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from .agent_tasks import read_tasks
from .base import Adapter, AdapterError, Json, check_arguments, errors_as, existing_file, suggest_name
from .episodes import Step, run_episode

PREFIX = "skyrl-gym/"
OWN_ARGUMENTS = ("tasks", "eval_tasks", "env_config")


class SkyRLGym(Adapter):
    """One registered environment, with a file of tasks for each split."""

    def __init__(self, env_id: str, args: Json) -> None:
        check_arguments(env_id, args, OWN_ARGUMENTS)
        self._env_id = env_id
        module, _, self._name = env_id.removeprefix(PREFIX).rpartition(":")
        self._library = importlib.import_module("skyrl_gym")
        if module:
            importlib.import_module(module)
        if self._name not in (registry := self._library.registry):
            raise AdapterError(
                f"skyrl-gym has no environment {self._name!r}.{suggest_name(self._name, registry)} "
                f"Environments: {', '.join(sorted(registry))}; one of another package has the id "
                "skyrl-gym/MODULE:NAME, where MODULE registers NAME"
            )
        if "tasks" not in args:
            raise AdapterError(f'{env_id} needs `tasks`, a file of JSON Lines with a "prompt" in each line')
        splits = {"train": "tasks", "eval": "eval_tasks"}
        self._tasks = {
            split: read_tasks(existing_file(args[name], name), flat=True)
            for split, name in splits.items()
            if name in args
        }
        config = importlib.import_module("omegaconf").OmegaConf
        self._config = config.create(args.get("env_config", {}))
        for first, *_ in self._tasks.values():
            with errors_as(f"{env_id} does not accept the task {first['id']!r}"):
                self.make(first).close()

    def make(self, task: Json) -> Any:
        """Return a new environment for a task."""
        return self._library.make(self._name, env_config=self._config, extras=task["data"])

    def info(self) -> Json:
        return {"name": self._env_id, "splits": list(self._tasks)}

    def tasks(self, split: str) -> Sequence[Json]:
        return self._tasks[split]

    async def rollout(self, task: Json, endpoint: Json, context: Json) -> Json:
        return await run_episode(SkyRLEpisode(self, task), endpoint)


class SkyRLEpisode:
    """Episode of one task. Its steps run in a thread, because they may search or execute code."""

    def __init__(self, adapter: SkyRLGym, task: Json) -> None:
        self._adapter, self._task = adapter, task
        self._env: Any = None

    async def start(self) -> Sequence[Json]:
        self._env = await asyncio.to_thread(self._adapter.make, self._task)
        messages, _ = await asyncio.to_thread(self._env.init, self._task["messages"])
        return messages  # type: ignore[no-any-return]

    async def step(self, reply: str) -> Step:
        output = await asyncio.to_thread(self._env.step, reply)
        text = output.get("postprocessed_action")
        return Step(
            reward=output["reward"],
            messages=output["observations"],
            stop_reason="done" if output["done"] else "",
            recorded=None if text in (None, reply) else {"role": "assistant", "content": text},
        )

    def components(self) -> Mapping[str, float]:
        metrics = self._env.get_metrics() if hasattr(self._env, "get_metrics") else {}
        return {name: float(value) for name, value in metrics.items() if isinstance(value, numbers.Real)}

    async def close(self) -> None:
        if self._env is not None:
            await asyncio.to_thread(self._env.close)
