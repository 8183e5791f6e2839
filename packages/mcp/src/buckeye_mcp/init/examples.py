"""Example tasks for a new configuration: calls that worked, with graders that find them, tried by playing."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from buckeye.envs.base import Message, Outcome, Reply, Tool
from buckeye_mcp.actions.check import DONE
from buckeye_mcp.actions.mapping import BoundCall, Constant, bind
from buckeye_mcp.actions.parser import parse_reply
from buckeye_mcp.actions.schema_words import harmless, literal
from buckeye_mcp.config import GymConfig
from buckeye_mcp.environment import TRAIN, McpEnvironment
from buckeye_mcp.init.scripted_rollout import Trial
from buckeye_mcp.init.source import Source
from buckeye_mcp.init.trial import trial_task
from buckeye_mcp.tasks.lock import ToolEntry

_FULL = 0.999
_LONGEST_SHOWN = 80
_SECONDS = 120.0
_MOST_TRIED = 4

_Row = dict[str, Any]


async def example_tasks(
    config: GymConfig, tools: Sequence[ToolEntry], trials: Sequence[Trial], source: Source
) -> list[_Row]:
    """At most three tasks, as rows of a file: the calls that they ask for earn all, doing nothing does not.
    Empty without a server that tasks can name, and without a call that worked."""
    by_name = {tool.name: tool for tool in tools}
    worked = [trial for trial in trials if trial.ending == "worked" and trial.result]
    worked.sort(key=lambda trial: "()" in trial.call)  # first those that have something to say
    if source.written is None:
        return []
    found: list[tuple[Trial, _Row]] = []
    both: _Row | None = None
    try:
        async with asyncio.timeout(_SECONDS):
            for trial in worked[:_MOST_TRIED]:
                task = await _checked([trial], config, by_name, source)
                found += [(trial, task)] if task is not None else []
                if len(found) == 2:
                    break
            if found:  # both of them, or the only one twice
                both = await _checked([found[0][0], found[-1][0]], config, by_name, source)
    except TimeoutError:
        typer.echo(
            f"note: within {_SECONDS:g} s there was no time to play more tasks to begin with", err=True
        )
    tasks = [task for _, task in found] + ([both] if both is not None else [])
    servers = {source.name: source.written, **source.beside}
    mcp_config = {name: one.model_dump(exclude_defaults=True) for name, one in servers.items()}
    return [
        {"id": f"example-{number}", **task, "mcp_config": mcp_config} for number, task in enumerate(tasks, 1)
    ]


async def _checked(
    draft: Sequence[Trial], config: GymConfig, tools: Mapping[str, ToolEntry], source: Source
) -> _Row | None:
    """The task of some calls, with the graders that hold when it is played; None if none do."""
    bound = [_bound(trial.call, config) for trial in draft]
    calls: _Row = {"in_order": [{"tool": one.tool, "arguments": dict(one.arguments)} for one in bound]}
    if len(bound) == 1:
        calls = calls["in_order"][0]
    results = [_result(one.tool, trial.result) for one, trial in zip(bound, draft, strict=True)]
    prompt = " Then: ".join(_said(one, config, tools) for one in bound) + " Then end the task."
    for more in ([one for one in results if one is not None], []):
        task = {"prompt": prompt, "grade": [{"calls": calls}, *({"result": one} for one in more[:1])]}
        reference, nothing = await asyncio.gather(
            _played(task, [trial.call for trial in draft], config, source), _played(task, [], config, source)
        )
        if _completed(reference) >= _FULL > _completed(nothing):
            return task
    return None


def _completed(outcome: Outcome) -> float:
    return outcome.components.get("task_completion", 0.0) if outcome.reward is not None else 0.0


def _bound(call: str, config: GymConfig) -> BoundCall:
    parsed = parse_reply(f"<think>I do this.</think><tool>{call}</tool>", config.parser, config.actions)
    return bind(parsed.calls[0], config.actions, {})


def _said(call: BoundCall, config: GymConfig, tools: Mapping[str, ToolEntry]) -> str:
    """A call as somebody would ask for it, without what is the same in every call."""
    action = next(one for one in config.actions.values() if one.tool == call.tool)
    fixed = {name for name, source in action.sources.items() if isinstance(source, Constant)}
    description = harmless(tools[str(call.tool)].description)
    what = re.split(r"(?<=[.!?])\s", description)[0][:200].rstrip(". ") or f"Call {call.tool}"
    given = ", ".join(
        f"{harmless(name)}: {literal(value)}" for name, value in call.arguments.items() if name not in fixed
    )
    return f"{what}{f' ({given})' if given else ''}."


def _result(tool: str | None, text: str) -> _Row | None:
    """What the result of a call has to be: a value that it announces, else its first line."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, Mapping):
        for key, item in _plain(value):
            return {"tool": tool, "any": True, "json_path": f"$[{json.dumps(key)}]", "exact": item}
    line = text.strip().split("\n")[0][:_LONGEST_SHOWN]
    return {"tool": tool, "any": True, "contains": line} if line else None


def _plain(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Short values that look as if they were the same tomorrow."""
    for key, item in value.items():
        if isinstance(item, str | int) and re.fullmatch(r"(?!.*\d{4}).{1,80}", str(item)):
            yield key, item


async def _played(task: _Row, calls: Sequence[str], config: GymConfig, source: Source) -> Outcome:
    async with trial_task(source) as on:
        environment = McpEnvironment(config, {TRAIN: [on.model_copy(update=task)]})
        return await environment.rollout(environment.tasks(TRAIN)[0], _Calls(calls))


class _Calls:
    """A policy that makes these calls, and ends."""

    def __init__(self, calls: Sequence[str]) -> None:
        self._left = [*calls, f"{DONE}()"]

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """The next call."""
        del messages, tools
        text = f"<think>I do this.</think><tool>{self._left.pop(0)}</tool>"
        return Reply(text=text, finish_reason="stop", message={"role": "assistant", "content": text})


def beside(config: Path) -> Path:
    """Where the example tasks of a configuration are."""
    return config.with_name(f"{config.stem}-tasks.json")
