"""Adapter for tasks of `inspect-ai`: the task's dataset, solver and scorers, with the trained model.

The solver runs in the worker. The reward is the value of the task's first score, or of the one that the
argument `score` names. Tasks with a sandbox are refused. A scorer that calls a model needs the argument
`grader`, because the trained model does not grade its own replies.
"""

from __future__ import annotations

import copy
import importlib
import json
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .base import Adapter, AdapterError, Boundary, Json, errors_as, failed, raised, scored
from .model import ModelError, chat

PREFIX = "inspect-ai/"
OWN_ARGUMENTS = ("eval", "limit", "score", "grader")
_MAX_CONNECTIONS = 100_000  # Buckeye limits the calls
_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}


class InspectAI(Adapter):
    """One task of a package or a file. The argument `eval` has the task's arguments for the eval tasks."""

    def __init__(self, env_id: str, args: Json) -> None:
        self._env_id = env_id
        settings = {name: value for name, value in args.items() if name not in OWN_ARGUMENTS}
        self._limit, self._score = args.get("limit"), args.get("score")
        self._tasks = {"train": self._load(settings)}
        if "eval" in args:
            self._tasks["eval"] = self._load({**settings, **args["eval"]})
        for task in self._tasks.values():
            if task.sandbox is not None or any(sample.sandbox for sample in task.dataset):
                raise AdapterError(f"{env_id} needs a sandbox, such as Docker, which Buckeye does not start")
        self._grader = _grader(args.get("grader"))

    def _load(self, settings: Json) -> Any:
        with errors_as(f"cannot load {self._env_id}"):
            tasks = _module("_eval.loader").load_tasks([self._env_id.removeprefix(PREFIX)], settings)
        if len(tasks) != 1:
            raise AdapterError(f"{self._env_id} has {len(tasks)} tasks: write inspect-ai/FILE.py@NAME")
        return tasks[0]

    def info(self) -> Json:
        return {"name": self._env_id, "splits": list(self._tasks)}

    def tasks(self, split: str) -> Iterator[Json]:
        dataset = self._tasks[split].dataset
        count = len(dataset) if self._limit is None else min(len(dataset), int(self._limit))
        return (self._task(split, index, dataset[index]) for index in range(count))

    def _task(self, split: str, index: int, sample: Any) -> Json:
        given = sample.input
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else map(_as_chat, given)
        data: Json = {"split": split, "index": index}
        if isinstance(sample.target, str) and sample.target and not sample.choices:
            data["answer"] = sample.target
        return {"id": f"{split}-{index}", "messages": list(messages), "data": data}

    async def rollout(self, task: Json, endpoint: Json, context: Json) -> Json:
        inspect_task = self._tasks[task["data"]["split"]]
        model = EndpointModel(endpoint)
        boundary: Boundary = "reset"
        try:
            sample = copy.deepcopy(inspect_task.dataset[task["data"]["index"]])
            state = self._new_state(inspect_task, sample, model)
            boundary = "step"
            try:
                try:
                    await self._solve(inspect_task, state, model)
                except _module("util").LimitExceededError:
                    model.truncated = True
                state = _module("solver._task_state").sample_state()
                boundary = "score"
                scores = await self._scores(inspect_task, state, sample)
            finally:
                if inspect_task.cleanup is not None:
                    await inspect_task.cleanup(state)
            return self._outcome(scores, model)
        except Exception as error:
            return raised("model", model.failure) if model.failure else raised(boundary, error)

    def _new_state(self, inspect_task: Any, sample: Any, model: EndpointModel) -> Any:
        """Return the state of a new rollout, and make it the state of this asyncio task."""
        state = _module("solver._task_state").TaskState(
            model=_module("model").ModelName(model.inspect_model),
            sample_id=sample.id or 1,
            epoch=1,
            input=sample.input,
            target=_module("scorer").Target(sample.target),
            choices=sample.choices,
            messages=_module("_eval.task.util").sample_messages(sample),
            message_limit=inspect_task.message_limit,
            metadata=sample.metadata or {},
        )
        _module("_eval.context").init_task_context(model.inspect_model)
        _module("model._model").init_sample_model_data()
        _module("log._transcript").init_transcript(_module("log._transcript").Transcript())
        _module("util._store").init_subtask_store(state.store)
        _module("solver._task_state").set_sample_state(state)
        return state

    async def _solve(self, inspect_task: Any, state: Any, model: EndpointModel) -> None:
        run = _module("_eval.task.run")

        async def generate(state: Any, tool_calls: str = "loop", cache: Any = None, **config: Any) -> Any:
            merged = inspect_task.config.merge(_module("model").GenerateConfig(**config))
            return await run.task_generate(model.inspect_model, state, tool_calls, False, merged)

        await run.resolve_plan(inspect_task, None)(state, generate)

    async def _scores(self, inspect_task: Any, state: Any, sample: Any) -> dict[str, Any]:
        """Return the scores by name: those of the solver, and those of the task's scorers.

        As in Inspect, further scorers with the same name get a number: `NAME1`.
        """
        _module("_eval.context").init_task_context(self._grader, {"grader": self._grader})
        target = _module("scorer").Target(sample.target)
        state.completed = True
        state.scores = dict(state.scores or {})
        for scorer in inspect_task.scorer or []:
            name = unnumbered = _module("_util.registry").registry_unqualified_name(scorer)
            number = 0
            while name in state.scores:
                number += 1
                name = f"{unnumbered}{number}"
            score = await scorer(state, target)
            if score is not None:
                state.scores[name] = score
        return state.scores  # type: ignore[no-any-return]

    def _outcome(self, scores: Mapping[str, Any], model: EndpointModel) -> Json:
        """Return the outcome of the scores. A score with several values gives `NAME.KEY` for each."""
        values: dict[str, Any] = {}
        for name, score in scores.items():
            parts = score.value if isinstance(score.value, dict) else {"": score.value}
            values |= {f"{name}.{key}" if key else name: value for key, value in parts.items()}
        chosen = self._score or next(iter(values), None)
        if chosen not in values:
            return failed(
                "score", "NoScore", f"the task has no score {chosen!r}; scores: {', '.join(values)}"
            )
        if (reward := _number(values[chosen])) is None:
            return failed("score", "NoNumber", f"the score {chosen} is {values[chosen]!r}, not a number")
        components = {
            name: number for name, value in values.items() if (number := _number(value)) is not None
        }
        return scored(reward, components=components, stop_reason="truncated" if model.truncated else "done")


class EndpointModel:
    """The model of a rollout's endpoint as a model of Inspect.

    Messages that it generated are sent unchanged later, so that the conversation only grows.
    """

    def __init__(self, endpoint: Json) -> None:
        self._endpoint = endpoint
        self._library = _module("model")
        self._sent: dict[str, tuple[Any, Json]] = {}
        self.failure: ModelError | None = None
        self.truncated = False
        unlimited = self._library.GenerateConfig(max_connections=_MAX_CONNECTIONS)
        self.inspect_model = self._library.get_model(
            "mockllm/model", custom_outputs=self._generate, memoize=False, config=unlimited
        )

    async def _generate(self, messages: Sequence[Any], tools: Sequence[Any], choice: Any, config: Any) -> Any:
        offered = [] if choice == "none" else [_tool(tool) for tool in tools]
        try:
            reply = await chat(
                self._endpoint, [self._as_chat(message) for message in messages], tools=offered
            )
        except ModelError as error:
            self.failure = error
            raise
        if reply.no_room:
            raise _module("util").LimitExceededError(
                "token", value=0, limit=0, message="the rollout has reached a limit"
            )
        parse = _module("model._call_tools").parse_tool_call
        calls = [
            parse(call["id"], call["function"]["name"], call["function"]["arguments"], list(tools))
            for call in reply.message.get("tool_calls") or ()
        ]
        message = self._library.ChatMessageAssistant(
            content=reply.text, tool_calls=calls or None, source="generate", model="policy"
        )
        self._sent[message.id] = (message.model_copy(deep=True), reply.message)
        stop_reason = "max_tokens" if reply.truncated else "tool_calls" if calls else "stop"
        choices = [self._library.ChatCompletionChoice(message=message, stop_reason=stop_reason)]
        return self._library.ModelOutput(model="policy", choices=choices, usage=self._library.ModelUsage())

    def _as_chat(self, message: Any) -> Json:
        original, sent = self._sent.get(message.id, (None, {}))
        same = original is not None and (original.text, original.tool_calls) == (
            message.text,
            message.tool_calls,
        )
        return sent if same else _as_chat(message)


def _as_chat(message: Any) -> Json:
    """Return a message of Inspect as a message of a chat. Raises ValueError for images and other media."""
    if not isinstance(message.content, str) and any(
        p.type not in ("text", "reasoning") for p in message.content
    ):
        raise ValueError("messages with images or other media cannot be sent to the model")
    chat_message: Json = {"role": message.role, "content": message.text}
    if message.role == "tool":
        chat_message["tool_call_id"] = message.tool_call_id
        chat_message["content"] = message.error.message if message.error else message.text
    if calls := getattr(message, "tool_calls", None):
        chat_message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function, "arguments": json.dumps(call.arguments)},
            }
            for call in calls
        ]
    return chat_message


def _grader(name: str | None) -> Any:
    """Return the model that scorers call, or without a name one that raises an error."""

    async def refuse(*args: Any) -> Any:
        raise AdapterError('the scorer calls a model: set `grader`, such as "openai/gpt-4o"')

    get_model = _module("model").get_model
    return get_model(name) if name else get_model("mockllm/model", custom_outputs=refuse, memoize=False)


def _tool(tool: Any) -> Json:
    parameters = tool.parameters.model_dump(exclude_none=True)
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _number(value: Any) -> float | None:
    """Return the number of a score's value: a number, a grade, or a text with a number."""
    if isinstance(value, numbers.Real):
        return float(value)
    try:
        return _GRADES[value] if value in _GRADES else float(value)
    except (TypeError, ValueError):
        return None


def _module(name: str) -> Any:
    """Return a module of Inspect."""
    return importlib.import_module(f"inspect_ai.{name}")
