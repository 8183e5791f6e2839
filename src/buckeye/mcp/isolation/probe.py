"""Run rollouts with generated tool calls, alone and in parallel, and report state that they share."""

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

import mcp_types as types

from buckeye.base.columns import counted
from buckeye.envs.base import Message, Reply, Tool
from buckeye.errors import UsageError
from buckeye.mcp.actions.action_schema import DONE, Action, OneArgument
from buckeye.mcp.actions.schema_text import NoExampleError, format_literal, make_example
from buckeye.mcp.actions.tool_list import call_form, make_call_reply
from buckeye.mcp.client.errors import McpEnvironmentError, ToolTimeoutError
from buckeye.mcp.client.rollout_sessions import open_sessions
from buckeye.mcp.client.session import SessionTimeouts
from buckeye.mcp.config import GymConfig, ParserConfig
from buckeye.mcp.isolation.compare import ProbeRollout, find_leaks, find_suspicious_outputs
from buckeye.mcp.rollout import run_rollout
from buckeye.mcp.tasks.task_schema import McpTask
from buckeye.mcp.workdir.folder import open_workdir

_TASKS, _PARALLEL, _CONFIRMING = 2, 4, 8
_CALL_SECONDS = 10.0
_MAX_CALLS = 24
_MAX_LISTED = 8
_WORD = "‹word›"
_CONSTRAINTS = ("enum", "const", "format", "pattern", "examples")
_NOT_COMPARED = {"workdir_seconds", "workdir_bytes"}
_Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class IsolationReport:
    """Result of the isolation check: number of compared tasks and rollouts, and findings in `shared`.

    `problem` is the reason if the check compared no task. `allowed` is True if the configuration allows
    shared state.
    """

    tasks: int
    rollouts: int
    seconds: float
    shared: Sequence[str]
    problem: str = ""
    allowed: bool = False

    def __str__(self) -> str:
        effort = (
            f"{counted(self.rollouts, 'rollout')} of {counted(self.tasks, 'task')} in {self.seconds:.1f} s"
        )
        if self.shared:
            more = f" (and {len(self.shared) - 1} more)" if len(self.shared) > 1 else ""
            return f"rollouts share state: {self.shared[0]}{more}; {effort}"
        if self.problem:
            return f"isolation of rollouts is unknown: {self.problem} ({effort})"
        return f"rollouts are isolated: same results alone and in parallel, {effort}"


def shared_state_error(report: IsolationReport) -> UsageError:
    """Return the error that ends a training run whose rollouts share state."""
    lines = ["rollouts of this environment share state, so they influence each other's rewards:"]
    return UsageError(
        "\n".join([*lines, *(f"  {finding}" for finding in report.shared[:_MAX_LISTED])]),
        code="BK-ENV-SHARED-STATE",
        hint="let the servers write only to the folder in which they start ({workdir}), and keep no state "
        "between sessions; if shared state is intended, set `shared_state: true` in the configuration",
    )


async def probe_isolation(tasks: Sequence[McpTask], config: GymConfig, seconds: float) -> IsolationReport:
    """Run some tasks twice alone, then four times in parallel, then alone, and compare the outputs.

    Stop after `seconds`.
    """
    limits = {"max_turns": 10_000, "tool_timeout": min(_CALL_SECONDS, config.defaults.tool_timeout)}
    limits["keep_workdir"] = None  # type: ignore[assignment]
    config = config.model_copy(update={"defaults": config.defaults.model_copy(update=limits)})
    comparison = _Comparison(config)
    problem = ""
    started = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            for task in tasks[:_TASKS]:
                await comparison.compare(task)
    except TimeoutError:
        problem = f"not finished within {seconds:g} s"
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
    """Findings of the comparisons of all tasks. A timeout during a task keeps the earlier findings."""

    def __init__(self, config: GymConfig) -> None:
        self._config = config
        self.tasks = self.rollouts = 0
        self.shared: list[str] = []
        self._faults: list[McpEnvironmentError] = []

    async def compare(self, task: McpTask) -> None:
        """Compare rollouts of one task. Raises McpEnvironmentError if all of them fail."""
        calls = await _plan_calls(task, self._config)
        before = [await self._run(task, calls) for _ in range(2)]
        parallel = await asyncio.gather(*(self._run(task, calls) for _ in range(_PARALLEL)))
        after = [await self._run(task, calls)]
        if not find_leaks([*before, *parallel, *after]) and find_suspicious_outputs(before, parallel, after):
            after += [await self._run(task, calls) for _ in range(_CONFIRMING)]
        if len(self._faults) == self.rollouts:
            raise self._faults[0]
        leaks = find_leaks([*before, *parallel, *after])
        findings = leaks or find_suspicious_outputs(before, parallel, after)
        self.shared += dict.fromkeys(f"task {task.id}, {finding}" for finding in findings)
        self.tasks += 1

    async def _run(self, task: McpTask, calls: Sequence[_Call]) -> ProbeRollout:
        policy = _CallingPolicy(calls, self._config.parser)
        first_process, outputs = _last_process_id(), policy.outputs
        try:
            outcome = await run_rollout(task, self._config, policy)
        except ToolTimeoutError:  # a slow tool is not a sign of shared state
            raise
        except McpEnvironmentError as fault:
            self._faults.append(fault)
            outputs.append((policy.current_call, f"{type(fault).__name__}: {fault}"))
        else:
            numbers = {"reward": outcome.reward, **outcome.components}
            outputs += [(name, str(value)) for name, value in numbers.items() if name not in _NOT_COMPARED]
        self.rollouts += 1
        processes = (first_process, _last_process_id())
        return ProbeRollout(outputs=outputs, mark=policy.mark, processes=processes)


class _CallingPolicy:
    """Policy that makes the given calls and then `done`. Its text arguments contain the word `mark`."""

    def __init__(self, calls: Sequence[_Call], parser: ParserConfig) -> None:
        self._calls, self._form = list(calls), call_form(parser) if parser.format == "xml" else ""
        self.mark = f"word{secrets.token_hex(4)}"
        self.current_call = "setup"
        self.outputs: list[tuple[str, str]] = []

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Record the result of the last call, and return the next call as a reply."""
        del tools
        result = str(messages[-1]["content"]).removeprefix("<result>\n").removesuffix("\n</result>")
        self.outputs.append((self.current_call, result))
        name, arguments = self._calls.pop(0) if self._calls else (DONE, {})
        arguments = json.loads(json.dumps(arguments, ensure_ascii=False).replace(_WORD, self.mark))
        call_text = ", ".join(f"{key}={format_literal(value)}" for key, value in arguments.items())
        self.current_call = f"{name}({call_text})".replace(self.mark, "word")
        return make_call_reply(name, arguments, form=self._form)


async def _plan_calls(task: McpTask, config: GymConfig) -> list[_Call]:
    """Return a call of every action, and then all calls again, so that early calls can read later writes.

    Omit tools that declare themselves destructive or open-world.
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
        hints = None if tool is None else tool.annotations
        if tool is None or (hints is not None and (hints.destructive_hint or hints.open_world_hint)):
            continue
        with suppress(NoExampleError):
            calls.append((action.name, _make_arguments(action, tool)))
    return 2 * calls[: _MAX_CALLS // 2]


def _make_arguments(action: Action, tool: types.Tool) -> dict[str, Any]:
    """Return example values for the required parameters of an action."""
    schema = tool.input_schema
    known: Mapping[str, Any] = schema.get("properties") or {}
    needed = {
        source.from_arg: known.get(name)
        for name, source in action.sources.items()
        if isinstance(source, OneArgument) and name in (schema.get("required") or ())
    }
    return {name: _make_value(parameter, schema) for name, parameter in needed.items()}


def _make_value(parameter: Any, schema: Mapping[str, Any]) -> Any:
    is_text = isinstance(parameter, Mapping) and parameter.get("type") == "string"
    if not is_text or any(key in parameter for key in _CONSTRAINTS):
        return make_example(parameter, schema)
    description = str(parameter.get("description", "")).upper()
    return f"CREATE TABLE {_WORD} (name TEXT)" if "CREATE TABLE" in description else _WORD


def _last_process_id() -> int:
    """Return the process id that the system assigned last, or 0 if unknown."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/loadavg").read_text().split()[-1])
    return 0
