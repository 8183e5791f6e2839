"""Adapter for tasksets of `verifiers` v1 (0.4): a harness runs the tasks, which score themselves.

Buckeye reads the following arguments. All other arguments are settings of the taskset.

- `harness`: a name, or a table with `id` and settings. Default: the taskset's own harness, else Buckeye's
  harness, which runs in the worker's process.
- `runtime`: where the program of the harness runs. Default: a process on this machine.
- `agent`: more settings of the agent.
- `eval`: settings of the taskset for the split `eval`, such as `eval = { split = "test" }`. Without it, the
  environment has only `train`.
- `limit`: maximum number of tasks. Default: 1000 for an endless taskset, else all.
- `seat`: the agent to train, if the environment trains several.
- `opponent`: "self" uses the same model for the other agents.

Replies of agents that are not trained, such as a simulated user, are not recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from .base import (
    Adapter,
    Boundary,
    Json,
    check_arguments,
    errors_as,
    failed,
    first_messages,
    raised,
    scored,
    trained_seat,
)

OWN_ARGUMENTS = ("harness", "runtime", "agent", "eval", "limit", "seat", "opponent")
OPPONENTS = ("self",)
ENDLESS_LIMIT = 1000
_UNUSED_URL = "http://127.0.0.1:9/v1"
_BOUNDARIES: dict[str, Boundary] = {
    "ProviderError": "model",
    "InterceptionError": "model",
    "HarnessError": "agent",
    "ToolsetError": "step",
    "SandboxError": "step",
    "EnvError": "step",
}


class VerifiersV1(Adapter):
    """One taskset, and the verifiers environment that runs it.

    A task contains all its data, so any worker can run it.
    """

    def __init__(self, env_id: str, module: ModuleType, args: Json) -> None:
        self._vf = importlib.import_module("verifiers.v1")
        self._harness_module = importlib.import_module(".verifiers_v1_harness", __package__)
        self._id = module.__name__
        settings = {name: value for name, value in args.items() if name not in OWN_ARGUMENTS}
        splits = {"train": settings, **({"eval": {**settings, **args["eval"]}} if "eval" in args else {})}
        with errors_as(f"cannot set up {env_id}"):
            self._envs = {split: self._environment(args, given) for split, given in splits.items()}
        seats = self._trained_agents(self._envs["train"])
        self._seat = seats[trained_seat(env_id, seats, args, OPPONENTS)]
        self._limit = args.get("limit")
        self._clients: dict[str, asyncio.Future[Any]] = {}
        self._serving: list[asyncio.Future[None]] = []
        self._closing = asyncio.Event()

    def _environment(self, args: Json, taskset: Json) -> Any:
        """Return the verifiers environment for a taskset's settings, with all agents configured."""
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        harness = args.get("harness") or self._default_harness(loaders)
        runtime = args.get("runtime", "subprocess")
        agent: Json = {
            "runtime": {"type": runtime} if isinstance(runtime, str) else runtime,
            **({"harness": {"id": harness} if isinstance(harness, str) else harness} if harness else {}),
            **args.get("agent", {}),
        }
        roles = self._agents(loaders.env_config_type(self._id))
        settings = {
            "taskset": {**taskset, "id": self._id},
            "interception": {"type": "server"},
            **dict.fromkeys(roles, agent),
        }
        try:
            config = self._vf.resolve_env_config(settings)
        except ValueError:  # of pydantic
            known = loaders.taskset_config_type(self._id).model_fields
            check_arguments(self._id, taskset, [*known, *OWN_ARGUMENTS])
            raise
        return self._vf.load_environment(config)

    def _default_harness(self, loaders: Any) -> str | None:
        """Return Buckeye's harness; None if the taskset has its own or its tasks need a container."""
        has_own_harness = loaders.default_harness_id(self._id) == self._id
        needs_container = loaders.task_type(self._id).NEEDS_CONTAINER
        return None if has_own_harness or needs_container else self._harness_module.HARNESS_ID

    def _agents(self, config_type: Any) -> list[str]:
        fields = config_type.model_fields
        return [name for name in fields if isinstance(fields[name].default, self._vf.AgentConfig)]

    def _trained_agents(self, env: Any) -> list[str]:
        """Return the names of the agents that an environment trains.

        The environment's `setup` marks all other agents as not trainable. If `setup` fails before, all agents
        count as trainable.
        """
        agents = {name: SimpleNamespace(trainable=True) for name in self._agents(type(env.config))}
        with contextlib.suppress(Exception):  # StopIteration if `setup` never awaits
            env.setup(SimpleNamespace(**agents)).send(None)
        return [name for name, agent in agents.items() if agent.trainable] or list(agents)

    def info(self) -> Json:
        return {
            "name": self._id.replace("_", "-"),
            "splits": list(self._envs),
            "judged": [judge.reward_name for judge in self._judges()],
        }

    def _judges(self) -> Iterator[Any]:
        """Yield the judges that the settings of the tasks name. Those in a task's own code are unknown."""
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        return map(loaders.load_judge, self._envs["train"].config.taskset.task.judges)

    def tasks(self, split: str) -> Iterator[Json]:
        taskset = self._envs[split].taskset
        limit = self._limit or (None if taskset.bounded else ENDLESS_LIMIT)
        for index, task in enumerate(taskset if limit is None else taskset.take(limit)):
            row = task.data.model_dump(mode="json", exclude_none=True)
            answers = {name: row[name] for name in ("accept", "answer") if name in row}
            yield {
                "id": f"{split}-{index}",
                "messages": first_messages(row.get("system_prompt"), row.get("prompt")),
                "data": {"split": split, "task": row, **answers},
            }

    async def rollout(self, task: Json, endpoint: Json, context: Json) -> Json:
        split = task["data"]["split"]
        env = self._envs[split]
        task_type = type(env.taskset).task_type()
        try:
            client = await self._client(split)
            data = task_type.data_type().model_validate(task["data"]["task"])
            (slot,) = env.slots(task_type(data, env.config.taskset.task))
        except Exception as error:
            return raised("reset", error)
        sampling = {name: value for name, value in endpoint["sampling"].items() if value is not None}
        model = self._vf.ModelContext(
            model=endpoint["model"], client=client.config, sampling=self._vf.SamplingConfig(**sampling)
        )
        trace_ids: list[str] = []

        def route(trace: Any) -> None:
            trace_ids.append(trace.id)
            client.routes[trace.id] = endpoint
            if trace.agent.name != self._seat:
                client.untrained.add(trace.id)

        try:
            episode = await env.run_slot(slot, model, on_trace=route)
        finally:
            for trace_id in trace_ids:
                client.routes.pop(trace_id, None)
                client.untrained.discard(trace_id)
        return _outcome(episode, self._seat)

    async def _client(self, split: str) -> Any:
        """Return the client of a split's environment. The first call starts to serve the environment.

        Raises the exception of a failed start.
        """
        if split not in self._clients:
            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._clients[split] = ready
            self._serving.append(asyncio.ensure_future(self._serve(split, ready)))
        return await asyncio.shield(self._clients[split])

    async def _serve(self, split: str, ready: asyncio.Future[Any]) -> None:
        """Serve a split's environment until `close`.

        The contexts of verifiers must open and close in one task.
        """
        env = self._envs[split]
        config = self._vf.EvalClientConfig(base_url=_UNUSED_URL, api_key_var="BUCKEYE_NO_KEY")
        client = self._harness_module.RoutingClient(config)
        try:
            async with env.serving():
                env._interception.clients[config.model_dump_json()] = client
                ready.set_result(client)
                await self._closing.wait()
        except Exception as error:
            if ready.done():
                raise
            del self._clients[split]  # the next rollout tries again
            ready.set_exception(error)
        finally:
            await client.close()

    async def close(self) -> None:
        self._closing.set()
        await asyncio.gather(*self._serving)


def _outcome(episode: Any, seat: str) -> Json:
    """Return the outcome of an episode: the reward of the trained agent."""
    traces = [trace for trace in episode.traces if trace.agent.name == seat]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        return failed(_boundary(errors[-1]), errors[-1].type, errors[-1].message)
    if not episode.ok:
        stops = ", ".join(str(trace.stop_condition) for trace in episode.traces) or "no episode"
        return failed("step", "NotOk", f"verifiers reports a failed rollout: {stops}")
    if len(traces) != 1:
        return failed(
            "score",
            "SeveralAgents",
            f"the environment ran {len(traces)} episodes of {seat}, expected one",
        )
    (trace,) = traces
    components = {**trace.metrics, **{name: reward.score for name, reward in trace.rewards.items()}}
    if calls := trace.extra_usage:
        components["judge_tokens"] = sum(call.prompt_tokens + call.completion_tokens for call in calls)
        components["judge_cost"] = sum(call.cost or 0.0 for call in calls)
    stop = "truncated" if trace.is_truncated else str(trace.stop_condition or "done")
    return scored(trace.reward, components=components, stop_reason=stop)


def _boundary(error: Any) -> Boundary:
    """Return the boundary of a recorded error. A task's own error names the hook that raised it."""
    if error.type != "TaskError":
        return _BOUNDARIES.get(error.type, "step")
    return "score" if "scoring" in error.message else "reset" if "setup" in error.message else "step"
