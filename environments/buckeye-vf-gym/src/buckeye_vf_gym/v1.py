"""MCP environments for the v1 API of `verifiers` (0.4): a taskset, and a harness that runs its tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf

from buckeye.envs.base import Message, Reply, Tool
from buckeye.errors import UsageError
from buckeye.mcp.environment import McpEnvironment, load_environment
from buckeye_vf_gym.replies import NO_ROOM, reply_of

_INFO = "buckeye"
_CHAT_TIMEOUT = 3600.0  # the rollout has its own deadline; this only ends a lost connection


class GymData(vf.TaskData):
    """Row of a task, whose servers, setup and evaluation the harness reads from the files."""

    dataset: str
    config_path: str
    eval_dataset: str | None = None
    split: str
    metadata: dict[str, Any]


class GymTask(vf.Task[GymData, vf.State, vf.TaskConfig]):
    """Task that its own servers graded during the rollout."""

    @vf.reward
    async def reward(self, trace: vf.Trace) -> float:
        """Return the reward from `evaluate_tool` and the weights of the configuration."""
        return float(_recorded_outcome(trace)["reward"])

    @vf.metric
    async def components(self, trace: vf.Trace) -> dict[str, float]:
        """Return the components, which are logged but not rewarded themselves."""
        return dict(_recorded_outcome(trace)["components"])


class GymConfig(vf.TasksetConfig):
    """Selection of tasks; names and meanings are those of `buckeye.mcp.environment.load_environment`."""

    dataset: str = ""
    config_path: str = ""
    eval_dataset: str | None = None
    num_tasks: int | None = None
    split: str = "train"


class GymTaskset(vf.Taskset[GymTask, GymConfig]):
    """Tasks of one split."""

    def load(self) -> Iterator[GymTask]:
        """Yield the tasks. Raises UsageError for invalid files, and for a system prompt outside of them."""
        config = self.config
        if not config.dataset or not config.config_path:
            raise UsageError(
                "buckeye-vf-gym needs `dataset` and `config_path`",
                code="BK-ENV-ARGUMENT",
                hint="set `dataset` to a file of tasks, and `config_path` to a configuration",
            )
        if self.system_prompt is not None:
            raise UsageError(
                "buckeye-vf-gym takes no system prompt from verifiers, because it must describe the actions",
                code="BK-ENV-ARGUMENT",
                hint=f"write it as `system_prompt` in {config.config_path}",
            )
        files = {"dataset": _absolute(config.dataset), "config_path": _absolute(config.config_path)}
        if config.eval_dataset is not None:
            files["eval_dataset"] = _absolute(config.eval_dataset)
        gym = load_environment(**files, num_tasks=config.num_tasks)
        for task in gym.tasks(config.split):
            prompt = str(task.messages[-1]["content"])
            data = GymData(id=task.id, prompt=prompt, split=config.split, metadata=dict(task.data), **files)
            yield GymTask(data, config.task)


class GymHarnessConfig(vf.HarnessConfig):
    """Empty: all settings are in the configuration of the taskset."""


class GymHarness(vf.Harness[GymHarnessConfig]):
    """Harness that runs rollouts in this process as Buckeye does, with the interception server's model."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Run a rollout.

        Raises vf.ToolsetError if the environment failed, and vf.HarnessError for a task of another taskset.
        """
        if not isinstance(data, GymData):
            raise vf.HarnessError("the harness buckeye-vf-gym runs only tasks of the taskset buckeye-vf-gym")
        gym = _environment(data.dataset, data.config_path, data.eval_dataset)
        task = next(task for task in gym.tasks(data.split) if task.id == data.id)
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=_CHAT_TIMEOUT) as client:
            outcome = await gym.rollout(task, _Policy(client, ctx.model, trace))
        if outcome.error is not None:
            raise vf.ToolsetError(outcome.error)
        trace.info[_INFO] = {
            "reward": outcome.reward,
            "components": dict(outcome.components),
            "stop_reason": outcome.stop_reason,
        }
        return vf.ProgramResult(0, "", "")


class _Policy:
    """Model of one rollout."""

    def __init__(self, client: httpx.AsyncClient, model: str, trace: vf.Trace) -> None:
        self._client = client
        self._model = model
        self._trace = trace

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Request a reply. A limit of verifiers ends the rollout. Raises vf.HarnessError without a reply."""
        body = {"model": self._model, "messages": [dict(message) for message in messages]}
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        response = await self._client.post("/chat/completions", json=body)
        if response.status_code != 200:
            if self._trace.stop_condition is not None:
                return NO_ROOM
            raise vf.HarnessError(
                f"the model sent no reply (HTTP {response.status_code}): {response.text[:500]}"
            )
        choice = response.json()["choices"][0]
        return reply_of(choice["message"], cut=choice["finish_reason"] == "length")


@cache
def _environment(dataset: str, config_path: str, eval_dataset: str | None) -> McpEnvironment:
    return load_environment(dataset, config_path, eval_dataset)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _recorded_outcome(trace: vf.Trace) -> dict[str, Any]:
    """Return the harness's record of the rollout. Raises vf.TaskError if another harness ran it."""
    if _INFO not in trace.info:
        raise vf.TaskError("the rollout was not run by the harness buckeye-vf-gym")
    return trace.info[_INFO]
