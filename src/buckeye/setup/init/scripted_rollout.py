"""Scripted rollouts with a new configuration, to test that its actions reach the tools."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from buckeye.envs.base import Message, Outcome, Reply, Tool
from buckeye.mcp.actions.action_schema import DONE, Action, OneArgument
from buckeye.mcp.actions.mapping import ActionError, bind_call
from buckeye.mcp.actions.parser import parse_reply
from buckeye.mcp.actions.schema_text import NoExampleError, format_literal, make_example, sanitize_text
from buckeye.mcp.client.errors import reports_server_failure
from buckeye.mcp.config import GymConfig
from buckeye.mcp.environment import TRAIN, McpEnvironment
from buckeye.mcp.rollout import SERVER_LOST
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
    """Result of the scripted rollouts.

    `stop_reason` belongs to the last rollout. `reward` is None if the rollout was not graded. `problem` is
    the reason why no rollout could run.
    """

    trials: tuple[ActionTrial, ...]
    stop_reason: str = ""
    reward: float | None = None
    problem: str = ""
    note: str = ""

    @property
    def failed(self) -> tuple[ActionTrial, ...]:
        """Actions whose call did not reach the tool, or made the environment fail."""
        return tuple(trial for trial in self.trials if trial.ending == "failed")

    @property
    def passed(self) -> bool:
        """True if the rollout ended with `done`, and no call failed.

        At least one call must have worked, unless all calls were held back.
        """
        endings = Counter(trial.ending for trial in self.trials)
        ended = not self.problem and self.stop_reason == "done"
        if ended and endings["held back"] == len(self.trials) > 0:
            return True
        return ended and verdict(endings["worked"] + endings["failed"], endings["failed"]) == "passed"


async def try_actions(
    config: GymConfig,
    tools: Sequence[ToolEntry],
    source: EnvironmentSource,
    task: McpTask | None,
    *,
    try_all: bool,
) -> TrialResult:
    """Run every action with generated arguments, then `done`.

    `task` defines setup and grading. If it is None, or needs tools of another server, the rollout is not
    graded, and a tool `setup` is called with generated arguments. Tools with `destructiveHint` or
    `openWorldHint` are called only with `try_all`.
    """
    limits = {"max_turns": 10_000, "tool_timeout": min(_CALL_SECONDS, config.defaults.tool_timeout)}
    files = task.files if task is not None and task.files is not None else config.files
    config = config.model_copy(update={"defaults": config.defaults.model_copy(update=limits), "files": files})
    by_name = {tool.name: tool for tool in tools}
    sample_path = _sample_path(config.files)
    trials: dict[str, ActionTrial] = {}
    pending: list[tuple[str, str]] = []
    for action in config.actions.values():
        if action.tool is not None:
            tool = by_name.get(action.tool)
            calls, trial = _prepare_calls(action, tool, config, sample_path)
            reason = "" if tool is None or try_all else _held_back_reason(tool, source.uncopied_address)
            if reason:
                calls, trial = [], ActionTrial(action.name, "", "held back", f"{reason}; --try-all calls it")
            pending += [(action.name, call) for call in calls]
            trials[action.name] = trial
    runner = _TrialRunner(config, source, trials, pending, _task_calls(task, by_name))
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            await runner.run()
    except TimeoutError:
        runner.problem = f"the rollout did not end within {_TIMEOUT_SECONDS:g} s"
    return TrialResult(tuple(trials.values()), runner.stop_reason, runner.reward, runner.problem, runner.note)


@dataclass(frozen=True, slots=True)
class _TaskCalls:
    """Calls for the setup and the grading of the rollouts."""

    setup: list[ToolCall]
    evaluate: list[ToolCall]
    is_generated: bool


def _task_calls(task: McpTask | None, tools: Mapping[str, ToolEntry]) -> _TaskCalls:
    if task is not None and {call.name for call in (*task.setup_tool, *task.evaluate_tool)} <= set(tools):
        return _TaskCalls(task.setup_tool, task.evaluate_tool, is_generated=False)
    setup = tools.get("setup")
    try:
        arguments = make_example(setup.input_schema, setup.input_schema or {}) if setup is not None else None
    except NoExampleError:
        arguments = None
    calls = [ToolCall(name="setup", arguments=arguments or {})] if setup is not None else []
    return _TaskCalls(calls, [], is_generated=True)


@dataclass(slots=True)
class _TrialRunner:
    """Run rollouts until every call was made. The environment may end a rollout before its last call."""

    _config: GymConfig
    _source: EnvironmentSource
    _trials: dict[str, ActionTrial]
    _pending: list[tuple[str, str]]
    _calls: _TaskCalls
    stop_reason: str = ""
    problem: str = ""
    note: str = ""
    reward: float | None = None

    async def run(self) -> None:
        """Run the rollouts, and store the results in the attributes."""
        while not self.problem and self.stop_reason != "done":
            before = len(self._pending)
            policy = _ScriptedPolicy(self._pending, self._trials)
            outcome = await self._rollout(policy)
            self.stop_reason = outcome.stop_reason
            if outcome.error is None:
                self.reward = outcome.components.get("task_completion") if self._calls.evaluate else None
                if len(self._pending) == before and outcome.stop_reason != "done":
                    self.problem = f"the rollout ended before the first call ({outcome.stop_reason})"
            elif outcome.stop_reason == "setup_failed" and self._calls.is_generated and self._calls.setup:
                self.note = f"setup refused the generated arguments: {_short_line(outcome.error)}"
                self._calls = _TaskCalls([], [], is_generated=True)
            elif not policy.record_failure(outcome.error):
                self.problem = outcome.error
            if policy.failed_action:
                policy.add_server_exit(outcome.explanations.get(SERVER_LOST, ""))
                self.stop_reason = ""  # the remaining calls need a new server

    async def _rollout(self, policy: _ScriptedPolicy) -> Outcome:
        async with trial_task(self._source) as task:
            calls = {"setup_tool": self._calls.setup, "evaluate_tool": self._calls.evaluate}
            task = task.model_copy(update=calls)
            environment = McpEnvironment(self._config, {TRAIN: [task]})
            return await environment.rollout(environment.tasks(TRAIN)[0], policy)


class _ScriptedPolicy:
    """A policy that makes the calls, records the result of each, and then ends the rollout."""

    def __init__(self, pending: list[tuple[str, str]], trials: dict[str, ActionTrial]) -> None:
        self._pending, self._trials = pending, trials
        self._current: tuple[str, str] | None = None  # action and call
        self.failed_action = ""
        """The action whose call ended its server, or ""."""

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Return the next call."""
        del tools
        if self._current is not None:
            self._record_result(str(messages[-1]["content"]))
        while self._pending and self._trials[self._pending[0][0]].ending == "worked":
            self._pending.pop(0)
        self._current = self._pending.pop(0) if self._pending and not self.failed_action else None
        call = self._current[1] if self._current is not None else f"{DONE}()"
        text = f"<think>I try this.</think><tool>{call}</tool>"
        if self._current is not None:  # remains if the call ends the rollout, because no result follows
            self._trials[self._current[0]] = ActionTrial(*self._current, "worked", "ended the rollout")
        return Reply(text=text, finish_reason="stop", message={"role": "assistant", "content": text})

    def record_failure(self, error: str) -> bool:
        """Record an error of the environment for the current call. Return False if no call was made."""
        if self._current is None:
            return False
        self._trials[self._current[0]] = ActionTrial(*self._current, "failed", _short_line(error))
        return True

    def add_server_exit(self, explanation: str) -> None:
        """Add the reason for the exit of the server to the trial of the call that caused the exit."""
        if explanation:
            trial = self._trials[self.failed_action]
            message = _short_line(explanation.rpartition("): ")[2])
            self._trials[self.failed_action] = replace(trial, message=message)

    def _record_result(self, content: str) -> None:
        assert self._current is not None
        result = content.removeprefix("<result>").removesuffix("</result>").strip()
        ending: Ending = "refused" if _REFUSAL.match(result) else "worked"
        self.failed_action = self._current[0] if reports_server_failure(result) else ""
        if self.failed_action or result.startswith("Invalid tool call"):
            ending = "failed"
        message = "" if ending == "worked" else _short_line(result)
        self._trials[self._current[0]] = ActionTrial(*self._current, ending, message)


def _prepare_calls(
    action: Action, tool: ToolEntry | None, config: GymConfig, sample_path: str
) -> tuple[list[str], ActionTrial]:
    """Return the calls to try for an action, and its preliminary result; check that each call is valid."""
    schema = (tool.input_schema if tool is not None else None) or {}
    known = schema.get("properties") or {}
    required = schema.get("required") or ()
    needed = [
        (n, s.from_arg) for n, s in action.sources.items() if isinstance(s, OneArgument) and n in required
    ]
    try:
        values = {given: make_example(known.get(name), schema) for name, given in needed}
    except NoExampleError as error:
        return [], ActionTrial(action.name, "", "not tried", f"cannot generate arguments: {error}")
    arguments = {n: "example".ljust(len(v), "s") if _is_filler(v) else v for n, v in values.items()}
    if sample_path:
        arguments |= {n: sample_path for n, v in values.items() if PATH_NAME.search(n) and _is_filler(v)}
    call = f"{action.name}({', '.join(map(format_literal, arguments.values()))})"
    if problem := _rejection_reason(call, config, {action.tool or "": schema}):
        return [], ActionTrial(action.name, call, "failed", problem)
    return [call], ActionTrial(action.name, call, "not tried", "the rollout ended earlier")


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


def _rejection_reason(call: str, config: GymConfig, schemas: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the reason why the configuration rejects a call, or ""."""
    parsed = parse_reply(f"<think>I try this.</think><tool>{call}</tool>", config.parser, config.actions)
    if parsed.problems or not parsed.calls:
        return parsed.problems[0].message if parsed.problems else "no call found"
    try:
        bind_call(parsed.calls[0], config.actions, schemas)
    except ActionError as error:
        return str(error)
    return ""


def _short_line(text: str) -> str:
    line = sanitize_text(text)
    return line if len(line) <= _MAX_MESSAGE_LENGTH else f"{line[:_MAX_MESSAGE_LENGTH]}…"
