"""Adapter for environments of the Open Reward Standard: classes of `ors-sdk` or of `openreward`.

The class runs in the worker, without its server. A rollout ends when a tool is `finished`, or with a reply
without a call, which a terminal tool of `openreward` grades. The reward is the sum over all calls. A class
with `score_group` adds the scores of a group to it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from .base import Adapter, AdapterError, Boundary, Json, KeptRollouts, check_arguments, raised, scored
from .model import ModelError, chat

PACKAGES = {"ors-sdk": "ors", "openreward": "openreward.environments"}
"""Package with the base class of environments, by the library of an id."""
OWN_ARGUMENTS = ("folder", "train", "eval", "limit")


class ORS(Adapter):
    """One environment class. `train` and `eval` name its splits for these purposes."""

    def __init__(self, env_id: str, args: Json) -> None:
        check_arguments(env_id, args, OWN_ARGUMENTS)
        library, _, path = env_id.partition("/")
        module, _, name = path.partition(":")
        self._base = importlib.import_module(PACKAGES[library])
        if args.get("folder"):
            sys.path.insert(0, os.path.expanduser(args["folder"]))
        self.name, self._limit = env_id, args.get("limit")
        found = getattr(importlib.import_module(module), name, None)
        if not (inspect.isclass(found) and issubclass(found, self._base.Environment)):
            raise AdapterError(
                f"{env_id}: {module} has no class {name!r} that is an Environment of {library}"
            )
        self._class = cast("Any", found)
        self._scores_groups = getattr(self._class, "_supports_score_group", bool)()
        self._kept = KeptRollouts()
        known = {getattr(split, "name", split): split for split in self._class.list_splits()}
        for argument in ("train", "eval"):
            if args.get(argument) not in (None, *known):
                raise AdapterError(
                    f"{env_id}: {argument} = {args[argument]!r} is not one of its splits: {', '.join(known)}"
                )
        kinds = {name: getattr(split, "type", name) for name, split in known.items()}
        train = args.get("train") or min(kinds, key=lambda name: kinds[name] != "train")
        held_out = args.get("eval") or next((name for name in kinds if name != train), None)
        self._splits = {"train": train, **({"eval": held_out} if held_out else {})}

    def info(self) -> Json:
        return {"name": self.name, "splits": list(self._splits), "group_rewards": self._scores_groups}

    def tasks(self, split: str) -> Iterator[Json]:
        name = self._splits[split]
        listed = self._class.list_tasks(name)
        if inspect.isawaitable(listed):
            raise AdapterError(f"{self.name}: an asynchronous `list_tasks` is not supported")
        return (
            {"id": f"{name}-{index}", "messages": [], "data": {"split": name, "index": index, "start": spec}}
            for index, spec in enumerate(listed[: self._limit])
        )

    async def rollout(self, task: Json, endpoint: Json, context: Json) -> Json:
        boundary: Boundary = "reset"
        try:
            async with self._session(task) as environment:
                messages = await _first_messages(environment)
                tools = [*environment.list_tools().tools, *environment.list_task_tools().tools]
                boundary, said = "step", len(messages)
                outcome = await _converse(environment, messages, [_tool(tool) for tool in tools], endpoint)
        except ModelError as error:
            return raised("model", error)
        except Exception as error:
            return raised(boundary, error)
        if not self._scores_groups:
            return outcome
        rollout = outcome, _transcript(messages[said:])
        if context.get("keep_for_group"):
            return self._kept.keep(rollout, context, stop_reason=outcome["stop_reason"])
        return (await self._score(task, [rollout]))[0]

    @asynccontextmanager
    async def _session(self, task: Json) -> AsyncIterator[Any]:
        environment = self._class(task["data"]["start"], {})
        try:
            await _awaited(environment.setup())
            yield environment
        finally:
            await _awaited(environment.teardown())

    async def score_group(self, task: Json, handles: Sequence[str]) -> list[Json]:
        return await self._score(task, self._kept.take(handles))

    async def _score(self, task: Json, rollouts: Sequence[tuple[Json, list[Json]]]) -> list[Json]:
        """Return the outcomes of a group, with its scores added to the rewards of the calls."""
        candidate = self._base.GroupCandidate
        try:
            candidates = [candidate.model_validate({"messages": said}) for _, said in rollouts]
            async with self._session(task) as environment:
                given = await _awaited(environment.score_group(candidates))
            scores = [float(getattr(score, "reward", score)) for score in given]
            return [_add(outcome, score) for (outcome, _), score in zip(rollouts, scores, strict=True)]
        except Exception as error:
            return [raised("score", error)] * len(rollouts)


async def _converse(environment: Any, messages: list[Json], tools: list[Json], endpoint: Json) -> Json:
    """Run the conversation, extend `messages` by it, and return the outcome."""
    grades_texts = getattr(environment.list_tools(), "terminal_tool", None) is not None
    reward, turns, finished, stop_reason = 0.0, 0, False, ""
    while not stop_reason:
        reply = await chat(endpoint, messages, tools=tools)
        if reply.no_room:
            stop_reason = "truncated"
            break
        turns += 1
        messages.append(reply.message)
        calls = reply.message.get("tool_calls") or ()
        for call in calls:
            content, earned, is_last = await _call(environment, call["function"])
            reward, finished = reward + earned, finished or is_last
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        if not calls and grades_texts:
            _, reward_of_text, finished = _result(await environment.call_terminal_tool(reply.text))
            reward += reward_of_text
        stop_reason = "done" if finished else "" if calls else "no_call"
    components = {"turns": turns, "finished": float(finished)}
    return scored(reward, components=components, stop_reason=stop_reason)


def _add(outcome: Json, score: float) -> Json:
    components = {**outcome["components"], "calls": outcome["reward"], "group": score}
    return {**outcome, "reward": outcome["reward"] + score, "components": components}


def _transcript(messages: Sequence[Json]) -> list[Json]:
    """Return the messages of a rollout in the form of `openreward`, where the user gives results of calls."""
    made: list[Json] = []
    for message in messages:
        text = {"type": "text", "text": message.get("content") or ""}
        if message["role"] == "tool":
            result = {"type": "tool_result", "tool_call_id": message["tool_call_id"], "blocks": [text]}
            if made[-1]["role"] == "assistant":
                made.append({"role": "user", "blocks": []})
            made[-1]["blocks"].append(result)
            continue
        blocks = [text] if text["text"] else []
        if reasoning := message.get("reasoning_content"):
            blocks.insert(0, {"type": "reasoning", "text": reasoning})
        for call in message.get("tool_calls") or ():
            given = {"name": call["function"]["name"], "input": _arguments(call["function"]) or {}}
            blocks.append({"type": "tool_call", "id": call["id"], **given})
        made.append({"role": "assistant", "blocks": blocks})
    return made


async def _first_messages(environment: Any) -> list[Json]:
    """Return the conversation that the task begins with. `ors-sdk` has only prompts."""
    if not hasattr(environment, "get_messages"):
        return [{"role": "user", "content": _text(await _awaited(environment.get_prompt()))}]
    messages = await _awaited(environment.get_messages())
    return [{"role": message.role, "content": _text(message.blocks)} for message in messages]


async def _call(environment: Any, function: Json) -> tuple[str, float, bool]:
    """Return the text of a call's result, its reward, and True if it finishes the episode."""
    arguments = _arguments(function)
    if arguments is None:
        return "The arguments are not a JSON object.", 0.0, False
    return _result(await environment._call_tool(function["name"], arguments))


def _arguments(function: Json) -> Json | None:
    """Return the arguments of a call, or None if they are not a JSON object."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


def _result(called: Any) -> tuple[str, float, bool]:
    result = called.root
    if not result.ok:
        return result.error, 0.0, False
    return _text(result.output.blocks), float(result.output.reward or 0.0), result.output.finished


def _text(blocks: Any) -> str:
    """Return the text of blocks. Raises ValueError for a block of another kind, such as an image."""
    if any(block.type != "text" for block in blocks):
        raise ValueError("only texts can be sent to the model")
    return "\n".join(block.text for block in blocks)


def _tool(tool: Any) -> Json:
    parameters = dict(tool.input_schema or {"type": "object", "properties": {}})
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
