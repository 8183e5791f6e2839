"""Rollouts of a task, alone and in parallel, by a policy that calls every tool with made-up arguments."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.base.columns import counted
from buckeye.envs.base import Message, Reply, Tool
from buckeye.errors import UsageError
from buckeye.mcp.actions.action_schema import DONE
from buckeye.mcp.actions.mapping import Action, FromArg
from buckeye.mcp.actions.schema_text import NoExampleError, format_literal, make_example
from buckeye.mcp.client.errors import McpEnvironmentError, ToolTimeoutError
from buckeye.mcp.client.rollout_sessions import open_sessions
from buckeye.mcp.client.session import SessionTimeouts, ToolInfo
from buckeye.mcp.config import GymConfig
from buckeye.mcp.isolation.compare import ProbeRollout, find_leaks, find_suspicious_outputs
from buckeye.mcp.rollout import run_rollout
from buckeye.mcp.tasks.task_schema import McpTask
from buckeye.mcp.workdir.folder import open_workdir

_TASKS, _BESIDE, _CONFIRMING = 2, 4, 8
_CALL_SECONDS = 10.0
_MOST_CALLS = 24
_MOST_LISTED = 8
_FREE = ("enum", "const", "format", "pattern", "examples")
_NOT_COMPARED = {"workdir_seconds", "workdir_bytes"}
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class IsolationReport:
    """Result of the isolation check: numbers of tasks and rollouts, and the state that they share.

    `problem` is the reason if nothing was compared. `allowed` is True if the configuration allows shared
    state.
    """

    tasks: int
    rollouts: int
    seconds: float
    shared: Sequence[str]
    problem: str = ""
    allowed: bool = False

    def __str__(self) -> str:
        played = (
            f"{counted(self.rollouts, 'rollout')} of {counted(self.tasks, 'task')} in {self.seconds:.1f} s"
        )
        if self.shared:
            more = f" (and {len(self.shared) - 1} more)" if len(self.shared) > 1 else ""
            return f"rollouts see each other: {self.shared[0]}{more}; {played}"
        if self.problem:
            return f"whether rollouts see each other is not known: {self.problem} ({played})"
        return f"rollouts are the same alone and side by side: {played}"


def shared_state_error(found: IsolationReport) -> UsageError:
    """Return the error that refuses training because rollouts see each other."""
    listed = "\n".join(f"  {one}" for one in found.shared[:_MOST_LISTED])
    return UsageError(
        f"rollouts of this environment see what others do, so their rewards are not their own:\n{listed}\n"
        "Have its servers keep their files in the folder that they are started in ({workdir}), and nothing "
        "between sessions; or, if that is meant, write `shared_state: true` into the configuration."
    )


async def probe_isolation(tasks: Sequence[McpTask], config: GymConfig, seconds: float) -> IsolationReport:
    """Run some tasks twice alone, then in parallel, then alone, within `seconds`."""
    limits = {"max_turns": 10_000, "tool_timeout": min(_CALL_SECONDS, config.defaults.tool_timeout)}
    limits["keep_workdir"] = None  # type: ignore[assignment]
    config = config.model_copy(update={"defaults": config.defaults.model_copy(update=limits)})
    comparison = _Comparison(config)
    problem = ""
    started = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            for task in tasks[:_TASKS]:
                await comparison.of(task)
    except TimeoutError:
        problem = f"there was no time for more within {seconds:g} s"
    except McpEnvironmentError as fault:
        problem = f"{type(fault).__name__}: {fault}"
    return IsolationReport(
        tasks=comparison.tasks,
        rollouts=comparison.rollouts,
        seconds=time.monotonic() - started,
        shared=comparison.shared,
        problem="" if comparison.tasks else problem,
        allowed=config.shared_state,
    )


class _Comparison:
    """Runs and compares rollouts. Keeps its findings if it is cut off by a timeout."""

    def __init__(self, config: GymConfig) -> None:
        self._config = config
        self.tasks = self.rollouts = 0
        self.shared: list[str] = []
        self._failed: list[McpEnvironmentError] = []

    async def of(self, task: McpTask) -> None:
        """Compare rollouts of one task. Raises McpEnvironmentError if all of them fail."""
        calls = await _calls_of(task, self._config)
        before = [await self._play(task, calls) for _ in range(2)]
        parallel = await asyncio.gather(*(self._play(task, calls) for _ in range(_BESIDE)))
        after = [await self._play(task, calls)]
        if not find_leaks([*before, *parallel, *after]) and find_suspicious_outputs(before, parallel, after):
            after += [await self._play(task, calls) for _ in range(_CONFIRMING)]
        if len(self._failed) == self.rollouts:
            raise self._failed[0]
        found = find_leaks([*before, *parallel, *after]) or find_suspicious_outputs(before, parallel, after)
        self.shared += dict.fromkeys(f"task {task.id}, {one}" for one in found)
        self.tasks += 1

    async def _play(self, task: McpTask, calls: Sequence[Call]) -> ProbeRollout:
        policy = _Calling(calls, native=self._config.parser.format == "tools")
        first = _last_process()
        said = policy.outputs
        try:
            outcome = await run_rollout(task, self._config, policy)
        except ToolTimeoutError:  # slow does not mean shared
            raise
        except McpEnvironmentError as fault:
            self._failed.append(fault)
            said.append((policy.doing, f"{type(fault).__name__}: {fault}"))
        else:
            numbers = {"reward": outcome.reward, **outcome.components}
            said += [(name, str(value)) for name, value in numbers.items() if name not in _NOT_COMPARED]
        self.rollouts += 1
        return ProbeRollout(outputs=said, mark=policy.mark, processes=(first, _last_process()))


class _Calling:
    """Policy that makes the given calls, with its own unique word in free texts, and then ends."""

    def __init__(self, calls: Sequence[Call], *, native: bool) -> None:
        self._calls, self._native = list(calls), native
        self.mark = f"word{secrets.token_hex(4)}"
        self.doing = "the setup"
        self.outputs: list[tuple[str, str]] = []

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Return the next call as a reply, and record the last result."""
        del tools
        read = str(messages[-1]["content"]).removeprefix("<result>\n").removesuffix("\n</result>")
        self.outputs.append((self.doing, read))
        name, arguments = self._calls.pop(0) if self._calls else (DONE, {})
        arguments = json.loads(json.dumps(arguments, ensure_ascii=False).replace(_WORD, self.mark))
        written = ", ".join(f"{key}={format_literal(value)}" for key, value in arguments.items())
        self.doing = f"{name}({written})".replace(self.mark, "word")
        if self._native:
            function = {"name": name, "arguments": json.dumps(arguments)}
            call = {"id": f"call-{len(self.outputs)}", "type": "function", "function": function}
            message: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            return Reply(text=name, finish_reason="stop", message=message)
        text = f"<think>I try this.</think><tool>{name}({written})</tool>"
        return Reply(text=text, finish_reason="stop", message={"role": "assistant", "content": text})


_WORD = "‹word›"


async def _calls_of(task: McpTask, config: GymConfig) -> list[Call]:
    """Return every action once, then all of them a second time, so that early calls can read later writes.

    Tools that declare themselves destructive or open-world are omitted.
    """
    timeouts = SessionTimeouts(start=config.defaults.setup_timeout, call=_CALL_SECONDS)
    async with (
        open_workdir(task, config) as workdir,
        open_sessions(task, timeouts, preload=config.defaults.preload, workdir=workdir) as sessions,
    ):
        tools = sessions.tools
    calls = []
    for action in config.actions.values():
        tool = tools.get(action.tool or "")
        if tool is None or any(tool.annotations.get(hint) for hint in ("destructiveHint", "openWorldHint")):
            continue
        with suppress(NoExampleError):
            calls.append((action.name, _arguments(action, tool)))
    return 2 * calls[: _MOST_CALLS // 2]


def _arguments(action: Action, tool: ToolInfo) -> dict[str, Any]:
    """Return made-up arguments for the required parameters of an action."""
    schema = tool.input_schema
    known: Mapping[str, Any] = schema.get("properties") or {}
    needed = {
        source.name: known.get(name)
        for name, source in action.sources.items()
        if isinstance(source, FromArg) and name in (schema.get("required") or ())
    }
    return {given: _value(wanted, schema) for given, wanted in needed.items()}


def _value(wanted: Any, schema: Mapping[str, Any]) -> Any:
    is_text = isinstance(wanted, Mapping) and wanted.get("type") == "string"
    if not is_text or any(key in wanted for key in _FREE):
        return make_example(wanted, schema)
    about = str(wanted.get("description", "")).upper()
    return f"CREATE TABLE {_WORD} (name TEXT)" if "CREATE TABLE" in about else _WORD


def _last_process() -> int:
    """Return the process id that the system assigned last; 0 if unknown."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/loadavg").read_text().split()[-1])
    return 0
