"""Run one rollout of an MCP task: open sessions, exchange messages with the model, and grade the result."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from buckeye.envs.base import ROLLOUT_DEADLINE, Message, Outcome, Policy, Reply, Tool, ToolAwarePolicy
from buckeye.mcp.actions.mapping import ActionError, bind_call
from buckeye.mcp.actions.parser import ParsedCall, ParsedReply, parse_reply, parse_tool_calls
from buckeye.mcp.actions.tool_list import build_action_tools, call_form
from buckeye.mcp.client.errors import McpEnvironmentError, SessionLostError
from buckeye.mcp.client.session import CallResult
from buckeye.mcp.config import GymConfig
from buckeye.mcp.evaluation_result import decode_result
from buckeye.mcp.grading.grade import FinishedRollout, record_call
from buckeye.mcp.grading.judge import RecordedCall, format_short
from buckeye.mcp.grading.task_graders import resolve_graders
from buckeye.mcp.rollout_resources import (
    RolloutResources,
    open_rollout_resources,
    truncate_text,
    works_in_fresh_session,
)
from buckeye.mcp.task_completion import grade_rollout
from buckeye.mcp.tasks.task_schema import McpTask

StopReason = Literal["done", "answered", "environment_done", "turn_limit", "time_limit", "truncated"]
"""Reason why a rollout ended.

`done`: the model called an action without a tool. `answered`: the model replied with text and no call.
`environment_done`: the result of a call contained `done: true`. `turn_limit`: the model sent `max_turns`
replies. `time_limit`: the rollout reached its `time_limit` or its deadline. `truncated`: a reply reached its
maximum length.
"""

SERVER_LOST = "server_lost_by_call"
"""Component of an outcome: the number of model calls that made a server fail, although fresh servers work."""
_NO_CALL = "Your reply has no tool call. Write one, as <tool>name(...)</tool>."
_MAX_ARGUMENTS_CHARS = 200
_GRADING_SHARE = 0.1  # of the time until the deadline, because grading must end before the deadline
_NOT_RUN = "Not run: only the first call of a reply is run."


@dataclass(slots=True)
class _Counts:
    """Counters of one rollout."""

    turns: int = 0
    attempts: int = 0
    successes: int = 0
    format_scores: list[float] = field(default_factory=list)
    lost_calls: list[str] = field(default_factory=list)
    cut_characters: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


async def run_rollout(task: McpTask, config: GymConfig, policy: Policy) -> Outcome:
    """Run one rollout of a task, and return its outcome.

    Raises McpEnvironmentError if the environment fails, because the rollout then has no reward.
    """
    started = time.monotonic()
    async with open_rollout_resources(task, config) as resources:
        conversation = _Conversation(task, config, policy, resources)
        stop_reason = await conversation.run(started)
        completion = await grade_rollout(task, config, resources, conversation.build_finished_rollout())
    counts = conversation.counts
    parts = {
        "task_completion": completion.score,
        "tool_execution": counts.successes / counts.attempts if counts.attempts else 0.0,
        "format_compliance": fmean(counts.format_scores) if counts.format_scores else 0.0,
    }
    lost = {SERVER_LOST: "; ".join(counts.lost_calls)} if counts.lost_calls else {}
    return Outcome(
        reward=config.rubric.weights.mean(parts),
        components={
            **completion.components,
            **parts,
            **_build_components(counts),
            **resources.workdir.metrics,
        },
        stop_reason=stop_reason,
        explanations=completion.explanations | lost,
    )


def first_messages(task: McpTask, config: GymConfig, state: str = "") -> list[Message]:
    """Return the messages before the first turn. The prompt ends with `state`, the output of the setup."""
    prompt = f"{task.prompt}\n\n{state}" if state else task.prompt
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    return [*system, {"role": "user", "content": prompt}]


class _Conversation:
    """Messages, calls and counters of one rollout."""

    def __init__(self, task: McpTask, config: GymConfig, policy: Policy, resources: RolloutResources) -> None:
        self._task, self._config, self._policy = task, config, policy
        self._resources, self._sessions = resources, resources.sessions
        self._reply_is_graded = any(grader.reply for grader in resolve_graders(task, config))
        self._native = config.parser.format == "tools"
        tools = build_action_tools(config, resources.sessions.tools)
        self._tools: Sequence[Tool] = tools if self._native else ()
        if not self._native and isinstance(policy, ToolAwarePolicy):
            policy.set_tools(tools, call_form(config.parser))
        self._messages = first_messages(task, config, resources.setup_output)
        self._stop_reason: StopReason | None = None
        self._deadline = math.inf
        self._last_reply = ""
        self._calls: list[RecordedCall] = []
        self.counts = _Counts()

    async def run(self, started: float) -> StopReason:
        """Run turns until the rollout ends, and return the stop reason.

        `started` is the value of `time.monotonic()` at the start of the rollout.
        """
        limits = self._config.defaults
        self._deadline = started + (1 - _GRADING_SHARE) * (ROLLOUT_DEADLINE.get() - started)
        last_start = min(self._deadline, started + (limits.time_limit or math.inf))
        for _ in range(limits.max_turns):
            if time.monotonic() >= last_start:
                return "time_limit"
            reply = await self._policy.chat(self._messages, tools=self._tools)
            # an empty, truncated reply is not a turn, because it only means that the context is full
            if reply.text or reply.finish_reason == "stop":
                self.counts.turns += 1
            parsed = self._parse(reply)
            self._messages.append(reply.message)
            self._last_reply = parsed.plain
            if reply.finish_reason == "length":
                return "truncated"
            if parsed.is_answer and (self._native or self._may_answer):
                return "answered"
            self._messages += await self._run_calls(reply, parsed)
            if self._stop_reason is not None:
                return self._stop_reason
        return "turn_limit"

    def build_finished_rollout(self) -> FinishedRollout:
        """Return the data of the rollout that graders read."""
        return FinishedRollout(
            task={"id": self._task.id, "prompt": self._task.prompt, "metadata": self._task.metadata},
            messages=self._messages,
            reply=self._last_reply,
            calls=self._calls,
            workdir=self._resources.workdir.path,
            call_tool=self._sessions.call,
        )

    @property
    def _may_answer(self) -> bool:
        """True if the rollout accepts text without a call as an answer. Otherwise a call is missing."""
        return self._reply_is_graded or self.counts.successes > 0

    def _parse(self, reply: Reply) -> ParsedReply:
        parser, actions = self._config.parser, self._config.actions
        if self._native:
            parsed = parse_tool_calls(reply.message, parser, actions)
        else:
            parsed = parse_reply(reply.text, parser, actions)
        if reply.text or reply.finish_reason == "stop":
            is_accepted = parsed.is_answer and self._may_answer
            self.counts.format_scores.append(parsed.answer_score if is_accepted else parsed.format_score)
        return parsed

    async def _run_calls(self, reply: Reply, parsed: ParsedReply) -> list[Message]:
        """Run the calls of a reply, and return messages with their results and the problems of the reply."""
        results: list[tuple[ParsedCall, str]] = []
        for call in parsed.calls:
            results.append((call, await self._run_call(call)))
            if self._stop_reason is not None:
                break
        if self._native:
            outputs = {call.call_id: text for call, text in results}
            outputs |= {
                problem.call_id: f"Invalid tool call: {problem.message}" for problem in parsed.problems
            }
            return [
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "name": call["function"]["name"] or "unknown",
                    "content": outputs.get(call["id"], _NOT_RUN),
                }
                for call in reply.message["tool_calls"]
            ]
        texts = [f"<result>\n{text}\n</result>" for _, text in results]
        texts += [f"Invalid tool call: {problem.message}" for problem in parsed.problems]
        return [{"role": "user", "content": "\n".join(texts) or _NO_CALL}]

    async def _run_call(self, call: ParsedCall) -> str:
        """Run a call, and return its result as text. Set the stop reason if the call ends the rollout."""
        try:
            bound = bind_call(call, self._config.actions, self._sessions.schemas)
        except ActionError as error:
            self.counts.attempts += 1
            return f"Error: {error}"
        if bound.tool is None:
            self._stop_reason = "done"
            return "Done."
        self.counts.attempts += 1
        try:
            seconds = min(self._config.defaults.tool_timeout, max(self._deadline - time.monotonic(), 0.1))
            result = await self._sessions.call(bound.tool, bound.arguments, timeout=seconds)
        except McpEnvironmentError as fault:
            result = await self._handle_fault(bound.tool, bound.arguments, fault)
        self._calls.append(record_call(bound.tool, bound.arguments, result))
        self.counts.successes += not result.is_error
        data = decode_result(result)
        if isinstance(data, Mapping) and data.get("done") is True:
            self._stop_reason = "environment_done"
        return self._format_result(result)

    async def _handle_fault(
        self, tool: str, arguments: Mapping[str, Any], fault: McpEnvironmentError
    ) -> CallResult:
        """Return an error result for the model, whose call made the server fail.

        Raises `fault` if a fresh session fails too, because the model's call is then not the cause.
        """
        is_known = bool(self.counts.lost_calls) and isinstance(fault, SessionLostError)
        if not is_known and not await works_in_fresh_session(self._task, self._config):
            raise fault
        shown = ", ".join(f"{name}={format_short(value)}" for name, value in arguments.items())
        ending = f" with {fault.exit_status}" if fault.exit_status else ""
        self.counts.lost_calls.append(f"{tool}({shown[:_MAX_ARGUMENTS_CHARS]}): {fault.to_model}{ending}")
        return CallResult(text=f"Error: {tool}: {fault.to_model}.", is_error=True)

    def _format_result(self, result: CallResult) -> str:
        text = result.text or ("" if result.structured is None else json.dumps(result.structured))
        text, cut = truncate_text(text, self._config.defaults.max_result_chars)
        self.counts.cut_characters += cut
        self.counts.dropped.update(result.dropped)
        if result.is_error and not text.lower().startswith("error"):
            text = f"Error: {text}"
        notes = [f"({count} {kind} not shown)" for kind, count in result.dropped.items()]
        return "\n".join([text, *notes] if text else notes or ["(no output)"])


def _build_components(counts: _Counts) -> dict[str, float]:
    numbers: dict[str, Any] = {
        "n_turns": counts.turns,
        "tool_calls": counts.attempts,
        "tool_errors": counts.attempts - counts.successes,
        SERVER_LOST: len(counts.lost_calls),
    }
    if counts.cut_characters:
        numbers["cut_characters"] = counts.cut_characters
    numbers |= {f"dropped_{kind}": count for kind, count in counts.dropped.items()}
    return {name: float(number) for name, number in numbers.items()}
