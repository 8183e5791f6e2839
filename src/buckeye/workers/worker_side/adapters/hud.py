"""Adapter for environments of HUD (`hud`): templates that yield a prompt, and then a grade of the answer.

Each rollout serves the environment in a separate process, as `hud eval` does. HUD's agent for chats calls the
tools of MCP servers and of a workspace. HUD's platform receives nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .base import (
    Adapter,
    AdapterError,
    Boundary,
    Json,
    check_arguments,
    errors_as,
    existing_file,
    failed,
    raised,
    scored,
)
from .model import ModelError, post

PREFIX = "hud/"
OWN_ARGUMENTS = ("folder", "tasks", "eval_tasks", "limit")
_WITHOUT_TOOLS = "filetracking"
"""Kind of a capability that only observes the agent."""
_IDENTITY = {"env", "id", "args"}


class HUD(Adapter):
    """The environments and tasks of one module. `tasks` and `eval_tasks` are files with other tasks."""

    def __init__(self, env_id: str, args: Json) -> None:
        check_arguments(env_id, args, OWN_ARGUMENTS)
        # with a key in ~/.hud, the platform would receive each rollout
        os.environ |= {"HUD_TELEMETRY_ENABLED": "false"}
        self.name, self._limit, self._library = env_id, args.get("limit"), _module("eval")
        source = _source(env_id, args.get("folder"))
        files = {"train": existing_file(args["tasks"], "tasks") if "tasks" in args else source}
        if "eval_tasks" in args:
            files["eval"] = existing_file(args["eval_tasks"], "eval_tasks")
        self._rows = {split: self._read(file) for split, file in files.items()}
        self._runtime = self._library.SubprocessRuntime(source)

    def _read(self, file: Path) -> list[Any]:
        """Return the tasks of a file. Raises AdapterError for no task, or one with a container."""
        with errors_as(f"cannot load {file}"):
            rows = list(self._library.Taskset.from_file(file))
        if not rows:
            raise AdapterError(f"{file} has no tasks: call a template, such as `tasks = [count(letter='r')]`")
        for row in (row for task in rows for row in (task, task.verifier) if row is not None):
            if row.runtime_config is not None:
                raise AdapterError(f"the task {row.slug} of {self.name} needs a container, such as Docker")
        return rows[: self._limit]

    def info(self) -> Json:
        return {"name": self.name, "splits": list(self._rows)}

    def tasks(self, split: str) -> Iterator[Json]:
        return (
            {
                "id": f"{split}-{row.slug}",
                "messages": [],
                "data": {
                    "split": split,
                    "index": index,
                    "start": row.model_dump(mode="json", include=_IDENTITY),
                },
            }
            for index, row in enumerate(self._rows[split])
        )

    async def rollout(self, task: Json, endpoint: Json, context: Json) -> Json:
        row, agent = self._rows[task["data"]["split"]][task["data"]["index"]], PolicyAgent(endpoint)
        run = await _module("eval.run").rollout(row, agent, runtime=self._runtime)
        if agent.failure is not None:
            return raised("model", agent.failure)
        if run.trace.is_error or run.grade.is_error:
            return failed(agent.phase, "HudError", str(run.trace.error or run.grade.content))
        components = {score["name"]: float(score["value"]) for score in run.evaluation.get("subscores") or ()}
        stop_reason = "truncated" if run.trace.stop_reason == "length" else "done"
        return scored(run.reward, components=components, stop_reason=stop_reason)


class PolicyAgent:
    """HUD's agent for chat completions with the model of an endpoint, and the client that it calls.

    `phase` is the part of the rollout that runs.
    """

    def __init__(self, endpoint: Json) -> None:
        self.failure: ModelError | None = None
        self.phase: Boundary = "reset"
        self.chat = self.completions = self  # the client is called as `client.chat.completions.create`
        self._endpoint = endpoint
        agents, types = _module("agents.openai_compatible"), _module("agents.types")
        config = types.OpenAIChatConfig(model=endpoint["model"], model_client=self, max_steps=sys.maxsize)
        self._agent = agents.OpenAIChatAgent(config)  # the rollout limits the turns
        self.config = config

    async def __call__(self, run: Any) -> None:
        """Run the conversation. Raises ValueError if the agent has no tools for a capability."""
        self.phase = "step"
        known = {client.protocol for client in self._agent.clients}
        for capability in run.client.manifest.bindings:
            kind = capability.protocol
            if kind not in known and kind.partition("/")[0] != _WITHOUT_TOOLS:
                raise ValueError(
                    f"the capability {capability.name} ({kind}) needs another agent than one of chats"
                )
        await self._agent(run)
        self.phase = "step" if run.trace.is_error else "score"

    async def create(self, *, stream: bool, extra_body: Json | None = None, **body: Any) -> Any:
        """Return the next completion of a conversation."""
        body |= {**(extra_body or {}), **self._endpoint.get("sampling", {})}
        try:
            url = f"{self._endpoint['base_url']}/chat/completions"
            response = await post(url, body, key=self._endpoint["api_key"])
        except ModelError as error:
            self.failure = error
            raise
        return importlib.import_module("openai.types.chat").ChatCompletion.model_validate(response)


def _source(env_id: str, folder: str | None) -> Path:
    """Return the file of the module `hud/MODULE`. Raises AdapterError."""
    if folder:
        sys.path.insert(0, os.path.expanduser(folder))
    found = importlib.util.find_spec(env_id.removeprefix(PREFIX))
    if found is None or found.origin is None:
        raise AdapterError(f"{env_id}: no such module; `folder` names the folder that has it")
    return Path(found.origin)


def _module(name: str) -> Any:
    """Return a module of the library."""
    return importlib.import_module(f"hud.{name}")
