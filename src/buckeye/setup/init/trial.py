"""Trial of a new configuration: call every action, to test that the calls reach the tools."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from buckeye.mcp.actions.action_schema import Action, OneArgument
from buckeye.mcp.actions.mapping import ActionError, BoundCall, bind_call
from buckeye.mcp.actions.parser import parse_reply
from buckeye.mcp.actions.schema_text import NoExampleError, format_literal, make_example, sanitize_text
from buckeye.mcp.client.errors import McpEnvironmentError, SetupError
from buckeye.mcp.client.rollout_sessions import RolloutSessions
from buckeye.mcp.config import GymConfig
from buckeye.mcp.grading.grade import FinishedRollout
from buckeye.mcp.rollout_resources import RolloutResources, open_rollout_resources
from buckeye.mcp.task_completion import grade_rollout
from buckeye.mcp.tasks.lock_file import ToolEntry
from buckeye.mcp.tasks.task_schema import McpTask, ToolCall
from buckeye.mcp.workdir.folder import WORKDIR
from buckeye.monitor.verdicts import verdict
from buckeye.setup.init.environment_source import EnvironmentSource
from buckeye.setup.init.tool_choice import PATH_NAME, has_hint
from buckeye.setup.init.trial_server import trial_task

Ending = Literal["worked", "refused", "failed", "not tried", "held back"]
"""Result of the trial of an action.

`refused`: the tool replied with an error, which is normal for generated arguments. `failed`: the call did not
reach the tool, or the environment failed. `not tried`: no arguments can be generated. `held back`: the tool
announces `destructiveHint` or `openWorldHint`, or may change data that is not a copy.
"""

_HINTS = ("destructiveHint", "openWorldHint")
_CALL_SECONDS = 20.0
_TIMEOUT_SECONDS = 300.0
_MAX_MESSAGE_LENGTH = 160
_TASK_FIELDS = ("id", "prompt", "metadata", "evaluate_tool", "grade")
_REFUSAL = re.compile(r'error|\{\s*"(?:error"|(?:success|ok)":\s*false|status":\s*"(?:error|fail))', re.I)


@dataclass(frozen=True, slots=True)
class ActionTrial:
    """Last call of an action, with its result."""

    action: str
    call: str
    ending: Ending
    message: str = ""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Result of the trial of all actions.

    `reward` is None if the trial was not graded. `problem` is the reason why the trial did not end.
    """

    trials: tuple[ActionTrial, ...]
    reward: float | None = None
    problem: str = ""
    note: str = ""

    @property
    def failed(self) -> tuple[ActionTrial, ...]:
        """Actions whose call did not reach the tool, or made the environment fail."""
        return tuple(trial for trial in self.trials if trial.ending == "failed")

    @property
    def passed(self) -> bool:
        """True if no call failed, and at least one call worked or all calls were held back."""
        endings = Counter(trial.ending for trial in self.trials)
        if endings["held back"] == len(self.trials) > 0:
            return not self.problem
        checked = verdict(endings["worked"] + endings["failed"], endings["failed"])
        return not self.problem and checked == "passed"


async def try_actions(
    config: GymConfig,
    tools: Sequence[ToolEntry],
    source: EnvironmentSource,
    task: McpTask | None,
    *,
    try_all: bool,
) -> TrialResult:
    """Call every action with generated arguments.

    `task` defines setup and grading. If it is None, or needs tools of another server, the trial is not
    graded, and a tool `setup` is called with generated arguments. Tools with `destructiveHint` or
    `openWorldHint` are called only with `try_all`.
    """
    defaults = {"tool_timeout": min(_CALL_SECONDS, config.defaults.tool_timeout)}
    files = task.files if task is not None and task.files is not None else config.files
    config = config.model_copy(
        update={"defaults": config.defaults.model_copy(update=defaults), "files": files}
    )
    by_name = {tool.name: tool for tool in tools}
    sample_path = _sample_path(config.files)
    run = _TrialRun(config, source)
    for action in config.actions.values():
        if action.tool is not None:
            tool = by_name.get(action.tool)
            trial, call = _prepare_call(action, tool, config, sample_path)
            reason = "" if tool is None or try_all else _held_back_reason(tool, source.uncopied_address)
            if reason:
                trial = ActionTrial(action.name, "", "held back", f"{reason}; --try-all calls it")
            elif call is not None:
                run.pending[action.name] = call
            run.trials[action.name] = trial
    problem = ""
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            await run.finish(task, by_name)
    except TimeoutError:
        problem = f"the trial did not end within {_TIMEOUT_SECONDS:g} s"
    except McpEnvironmentError as fault:
        problem = str(fault)
    return TrialResult(tuple(run.trials.values()), run.reward, problem, run.note)


@dataclass(slots=True)
class _TrialRun:
    """Calls that are not made yet, and the results of the others."""

    config: GymConfig
    source: EnvironmentSource
    trials: dict[str, ActionTrial] = field(default_factory=dict)
    pending: dict[str, BoundCall] = field(default_factory=dict)
    reward: float | None = None
    note: str = ""

    async def finish(self, task: McpTask | None, tools: Mapping[str, ToolEntry]) -> None:
        """Make all calls. A call that ends its server is followed by a new environment for the others."""
        setup, is_generated = _setup_calls(task, tools)
        own = {} if task is None or is_generated else {name: getattr(task, name) for name in _TASK_FIELDS}
        has_finished = False
        while not has_finished:
            async with trial_task(self.source) as empty:
                prepared = empty.model_copy(update=own | {"setup_tool": setup})
                try:
                    async with open_rollout_resources(prepared, self.config) as resources:
                        has_finished = await self._make_calls(resources.sessions)
                        if has_finished and (prepared.evaluate_tool or prepared.grade):
                            self.reward = await _grade(prepared, self.config, resources)
                except SetupError as error:
                    if not is_generated or not setup:
                        raise
                    self.note = f"setup refused the generated arguments: {_short_line(str(error))}"
                    setup = []

    async def _make_calls(self, sessions: RolloutSessions) -> bool:
        """Make the pending calls. Return False if a call ended its server."""
        for action in list(self.pending):
            call = self.pending.pop(action)
            assert call.tool is not None
            try:
                result = await sessions.call(call.tool, call.arguments, self.config.defaults.tool_timeout)
            except McpEnvironmentError as fault:
                status = f" with {fault.exit_status}" if fault.exit_status else ""
                self._record(action, "failed", f"{fault.to_model}{status}")
                return False
            if result.is_error or _REFUSAL.match(result.text):
                self._record(action, "refused", result.text)
            else:
                self._record(action, "worked")
        return True

    def _record(self, action: str, ending: Ending, message: str = "") -> None:
        self.trials[action] = replace(self.trials[action], ending=ending, message=_short_line(message))


def _setup_calls(task: McpTask | None, tools: Mapping[str, ToolEntry]) -> tuple[list[ToolCall], bool]:
    """Return the calls for setup, and whether their arguments are generated."""
    if task is not None and {call.name for call in (*task.setup_tool, *task.evaluate_tool)} <= set(tools):
        return task.setup_tool, False
    if (setup := tools.get("setup")) is None:
        return [], True
    try:
        arguments = make_example(setup.input_schema, setup.input_schema or {})
    except NoExampleError:
        arguments = None
    return [ToolCall(name="setup", arguments=arguments or {})], True


async def _grade(task: McpTask, config: GymConfig, resources: RolloutResources) -> float:
    finished = FinishedRollout(
        task={"id": task.id, "prompt": task.prompt, "metadata": task.metadata},
        messages=(),
        reply="",
        calls=(),
        workdir=resources.workdir.path,
        call_tool=resources.sessions.call,
    )
    return (await grade_rollout(task, config, resources, finished)).score


def _prepare_call(
    action: Action, tool: ToolEntry | None, config: GymConfig, sample_path: str
) -> tuple[ActionTrial, BoundCall | None]:
    """Return the preliminary result of an action, and its call, or None if it has no valid call."""
    schema = (tool.input_schema if tool is not None else None) or {}
    known = schema.get("properties") or {}
    required = schema.get("required") or ()
    needed = [
        (n, s.from_arg) for n, s in action.sources.items() if isinstance(s, OneArgument) and n in required
    ]
    try:
        values = {given: make_example(known.get(name), schema) for name, given in needed}
    except NoExampleError as error:
        return ActionTrial(action.name, "", "not tried", f"cannot generate arguments: {error}"), None
    arguments = {n: "example".ljust(len(v), "s") if _is_filler(v) else v for n, v in values.items()}
    if sample_path:
        arguments |= {n: sample_path for n, v in values.items() if PATH_NAME.search(n) and _is_filler(v)}
    call = f"{action.name}({', '.join(map(format_literal, arguments.values()))})"
    reply = f"<think>I try this.</think><tool>{call}</tool>"
    parsed = parse_reply(reply, config.parser, config.actions)
    if parsed.problems:
        return ActionTrial(action.name, call, "failed", parsed.problems[0].message), None
    try:
        bound = bind_call(parsed.calls[0], config.actions, {action.tool or "": schema})
    except ActionError as error:
        return ActionTrial(action.name, call, "failed", str(error)), None
    return ActionTrial(action.name, call, "not tried", "the trial ended earlier"), bound


def _held_back_reason(tool: ToolEntry, uncopied_address: str) -> str:
    """Return the reason why a tool is not called without `try_all`, or ""."""
    if (hint := next((hint for hint in _HINTS if has_hint(tool, hint)), None)) is not None:
        return f"announces {hint}"
    if uncopied_address and not has_hint(tool, "readOnlyHint"):
        return f"may change data at {uncopied_address}, which is not a copy"
    return ""


def _is_filler(value: Any) -> bool:
    """Return True if a text is a placeholder such as `...`."""
    return isinstance(value, str) and bool(value) and not value.strip(".")


def _sample_path(files: str | None) -> str:
    """Return the path of the first entry of a rollout's folder, or "" if the folder is empty."""
    names = sorted(path.name for path in Path(files).glob("[!.]*")) if files is not None else []
    return f"{WORKDIR}/{names[0]}" if names else ""


def _short_line(text: str) -> str:
    line = sanitize_text(text)
    return line if len(line) <= _MAX_MESSAGE_LENGTH else f"{line[:_MAX_MESSAGE_LENGTH]}…"
