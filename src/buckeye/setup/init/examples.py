"""Example tasks for a new configuration: calls that worked, with graders that find them, tried by playing."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from buckeye.envs.base import Message, Outcome, Reply, Tool
from buckeye.mcp.actions.check import DONE
from buckeye.mcp.actions.mapping import BoundCall, Constant, bind
from buckeye.mcp.actions.parser import parse_reply
from buckeye.mcp.actions.schema_words import harmless, literal
from buckeye.mcp.config import GymConfig
from buckeye.mcp.environment import TRAIN, McpEnvironment
from buckeye.mcp.grading.read_only_sql import rows_of
from buckeye.mcp.tasks.lock import ToolEntry
from buckeye.mcp.workdir.folder import places
from buckeye.setup.init.scripted_rollout import Trial
from buckeye.setup.init.source import Source
from buckeye.setup.init.trial import trial_task

_FULL = 0.999
_LONGEST_SHOWN = 80
_SECONDS = 120.0
_MOST_TRIED = 4
_MOST_FILES, _LARGEST = 200, 1_000_000
_SHORT = r"(?!.*\d{4})[^\ufffd\0]{1,80}"  # without what looks like a time
_SQLITE = b"SQLite format 3\0"

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
        said = f"note: within {_SECONDS:g} s there was no time to play more tasks to begin with"
        typer.echo(said, err=True)
    tasks = [task for _, task in found] + ([both] if both is not None else [])
    servers = {source.name: source.written, **source.beside}
    mcp_config = {name: one.model_dump(exclude_defaults=True) for name, one in servers.items()}
    return [{"id": f"example-{n}", **task, "mcp_config": mcp_config} for n, task in enumerate(tasks, 1)]


async def _checked(
    draft: Sequence[Trial], config: GymConfig, tools: Mapping[str, ToolEntry], source: Source
) -> _Row | None:
    """The task of some calls, with the graders that hold when it is played; None if none do."""
    bound = [_bound(trial.call, config) for trial in draft]
    calls: _Row = {"in_order": [{"tool": one.tool, "arguments": dict(one.arguments)} for one in bound]}
    if len(bound) == 1:
        calls = calls["in_order"][0]
    results = [_result(tools[str(one.tool)], trial.result) for one, trial in zip(bound, draft, strict=True)]
    found: list[_Row] = [{"result": one} for one in results if one is not None][:1]
    prompt = " Then: ".join(_said(one, config, tools) for one in bound) + " Then end the task."
    task: _Row = {"prompt": prompt, "grade": [{"calls": calls}]}
    left = await _left_by(task, [trial.call for trial in draft], config, source)
    for more in ([*found, *left], found, left, []):
        task["grade"] = [{"calls": calls}, *more]
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
    shown = {name: literal(value) for name, value in call.arguments.items() if name not in fixed}
    given = ", ".join(f"{harmless(name)}: {value}" for name, value in shown.items())
    return f"{what}{f' ({given})' if given else ''}."


def _result(tool: ToolEntry, text: str) -> _Row | None:
    """What the result of a call has to be: a value that its schema announces, else one that it has, else its
    first line."""
    announced = (tool.output_schema or {}).get("properties") or {}
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if list(announced) == ["result"] and not isinstance(value, Mapping):  # as SDKs say of a plain value
        value = {"result": value}
    if isinstance(value, Mapping):
        for key, item in _plain({key: value[key] for key in (*announced, *value) if key in value}):
            return {"tool": tool.name, "any": True, "json_path": f"$[{json.dumps(key)}]", "exact": item}
    line = text.strip().split("\n")[0][:_LONGEST_SHOWN]
    return {"tool": tool.name, "any": True, "contains": line} if line else None


async def _left_by(task: _Row, calls: Sequence[str], config: GymConfig, source: Source) -> list[_Row]:
    """A grader of a file or a database that the calls have made or changed; none where there is no such."""
    kept = places().new()
    limits = config.defaults.model_copy(update={"keep_workdir": str(kept)})
    await _played(task, calls, config.model_copy(update={"defaults": limits}), source)
    for folder in kept.glob("*/work"):
        for path in itertools.islice(sorted(folder.rglob("[!.]*")), _MOST_FILES):
            name = path.relative_to(folder)
            before = source.files / name if source.files is not None else None
            hidden = any(part.startswith(".") for part in name.parts)
            if not hidden and path.is_file() and not path.is_symlink() and (row := _changed(path, before)):
                return [{"state": {row[0]: str(name), **row[1]}}]
    return []


def _changed(path: Path, before: Path | None) -> tuple[str, _Row] | None:
    """What a file has to hold that it did not: a number of rows, or its last line."""
    if path.stat().st_size > _LARGEST:
        return None
    content = path.read_bytes()
    old = before.read_bytes() if before is not None and before.is_file() else b""
    if content.startswith(_SQLITE):
        known = _counts(before) if before is not None and old else {}
        changed = ((query, count) for query, count in _counts(path).items() if known.get(query, 0) != count)
        return next((("database", {"query": query, "rows": [[count]]}) for query, count in changed), None)
    last = content.decode(errors="replace").strip().rpartition("\n")[2]
    is_new = last not in old.decode(errors="replace") and re.fullmatch(_SHORT, last) is not None
    return ("file", {"contains": last}) if is_new else None


def _counts(database: Path) -> dict[str, int]:
    """Query -> the number of rows that it counts, for each table."""
    found: dict[str, int] = {}
    with suppress(sqlite3.Error, ValueError):
        for (table,) in rows_of(database, "SELECT name FROM sqlite_master WHERE type = 'table'", []):
            name = str(table).replace('"', '""')
            query = f'SELECT count(*) FROM "{name}"'  # noqa: S608  of a connection that only reads
            found[query] = int(rows_of(database, query, [])[0][0])
    return found


def _plain(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Short values that look as if they were the same tomorrow."""
    for key, item in value.items():
        if isinstance(item, str | int) and re.fullmatch(_SHORT, str(item)):
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
