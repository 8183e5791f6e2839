"""MCP environments for the v0 API of `verifiers` (0.1.14 and later of 0.1)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import verifiers as vf
from datasets import Dataset
from verifiers.utils.message_utils import normalize_messages

from buckeye.envs.base import Message, Reply, Task, Tool
from buckeye.mcp.config import WeightsConfig
from buckeye.mcp.environment import EVAL, TRAIN, McpEnvironment
from buckeye.mcp.environment import load_environment as load_mcp_environment
from buckeye_vf_gym.replies import NO_ROOM, reply_of

COMPONENTS = tuple(WeightsConfig.model_fields)
_OUTCOME = "outcome"


def load_environment(
    dataset: str,
    config_path: str,
    eval_dataset: str | None = None,
    num_tasks: int | None = None,
) -> GymEnv:
    """Return the environment of the tasks in the file `dataset` and the configuration at `config_path`.

    The arguments are those of `buckeye.mcp.environment.load_environment`. Raises UsageError.
    """
    return GymEnv(load_mcp_environment(dataset, config_path, eval_dataset, num_tasks))


class GymEnv(vf.MultiTurnEnv):
    """Environment that runs rollouts as Buckeye does; every reply is a step of the trajectory.

    Texts from a task's setup are added to the prompt, as the first step's prompt shows.
    """

    def __init__(self, gym: McpEnvironment) -> None:
        datasets = {split: _dataset(gym, split) for split in gym.splits}
        super().__init__(
            dataset=datasets.get(TRAIN),
            eval_dataset=datasets.get(EVAL),
            rubric=_rubric(),
            env_id=gym.name,
        )
        self._gym = gym

    async def setup_state(self, state: vf.State) -> None:
        """Run the entire rollout. Raises vf.InfraError if the environment failed."""
        task = Task(id=state["info"]["task_id"], messages=())
        outcome = await self._gym.rollout(task, _Policy(self, state))
        if outcome.error is not None:
            raise vf.InfraError(outcome.error)
        state["stop_reason"] = outcome.stop_reason
        state[_OUTCOME] = outcome

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        """Raise: this is never called, because the conversation is over after the state's setup."""
        raise AssertionError("the rollout has already run")

    @vf.stop
    async def played(self, state: vf.State) -> bool:
        """Return True if the rollout is over."""
        return _OUTCOME in state


class _Policy:
    """Model of one rollout."""

    def __init__(self, env: GymEnv, state: vf.State) -> None:
        self._env = env
        self._state = state

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Request a reply. A prompt that is too long ends the rollout. Raises vf.Error for other failures."""
        prompt = normalize_messages([_flat(message) for message in messages])
        tool_defs = [vf.Tool(**tool["function"]) for tool in tools]
        try:
            response = await self._env.get_model_response(self._state, prompt, tool_defs=tool_defs)
        except vf.OverlongPromptError:
            self._state["prompt_too_long"] = self._state["is_truncated"] = True
            return NO_ROOM
        await self._env.add_model_response(self._state, prompt, response)
        return reply_of(_nested(response.message), cut=response.message.is_truncated is True)


def _flat(message: Message) -> dict[str, Any]:
    """Return a message in verifiers' form: a call is its name and arguments; tool results have no name."""
    kept = {key: value for key, value in message.items() if key != "name"}
    if kept.get("tool_calls"):
        kept["tool_calls"] = [{"id": call["id"], **call["function"]} for call in kept["tool_calls"]]
    return kept


def _nested(message: Any) -> dict[str, Any]:
    """Return the message of a response in the OpenAI form."""
    fields = message.model_dump(include={"content", "reasoning_content", "tool_calls"})
    for call in fields["tool_calls"] or ():
        call |= {"type": "function", "function": {key: call.pop(key) for key in ("name", "arguments")}}
    return {**fields, "tool_calls": fields["tool_calls"] or None}


def _dataset(gym: McpEnvironment, split: str) -> Dataset:
    """Return the tasks of a split as rows; `info` is JSON because a column needs one type in all rows."""
    return Dataset.from_list(
        [
            {
                "prompt": [dict(message) for message in task.messages],
                "answer": "",
                "info": json.dumps({**task.data, "task_id": task.id}),
            }
            for task in gym.tasks(split)
        ]
    )


def _rubric() -> vf.Rubric:
    """Return a rubric with the reward, and its parts as metrics of weight 0."""

    def reward(state: vf.State) -> float:
        return float(state[_OUTCOME].reward) if _OUTCOME in state else 0.0

    parts = [_component(name) for name in COMPONENTS]
    return vf.Rubric(funcs=[reward, *parts], weights=[1.0, *(0.0 for _ in parts)])


def _component(name: str) -> Callable[[vf.State], float]:
    def component(state: vf.State) -> float:
        return float(state[_OUTCOME].components[name]) if _OUTCOME in state else 0.0

    component.__name__ = name
    return component
