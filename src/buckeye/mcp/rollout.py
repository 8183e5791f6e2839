"""One rollout: sessions, setup, conversation and evaluation. The evaluation always runs."""

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
from buckeye.mcp.reward import score
from buckeye.mcp.rollout_resources import (
    RolloutResources,
    find_fresh_session_fault,
    open_rollout_resources,
    truncate_text,
)
from buckeye.mcp.task_completion import grade_rollout
from buckeye.mcp.tasks.task_schema import McpTask

StopReason = Literal["done", "answered", "environment_done", "turn_limit", "time_limit", "truncated"]
"""Reason why a rollout ended.

`done`: the model called an action without a tool. `answered`: the model replied with text and no call.
`environment_done`: a result contained `done: true`. `turn_limit`, `time_limit`: limits of the configuration.
`truncated`: a reply was cut off at a length limit.
"""

SERVER_LOST = "server_lost_by_call"
"""Component that counts the model's calls after which a server failed, while a fresh server works."""
_NO_CALL = "Your reply has no tool call. Write one, as <tool>name(...)</tool>."
_LONGEST_LOST = 200
_FOR_GRADING = 0.1  # share of the rollout's time: a rollout that exceeds its time has no reward
_NOT_RUN = "Not run: only the first call of a reply is."


@dataclass(slots=True)
class _Counts:
    """Counters of one rollout."""

    turns: int = 0
    attempts: int = 0
    successes: int = 0
    format_scores: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    cut: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


async def run_rollout(task: McpTask, config: GymConfig, policy: Policy) -> Outcome:
    """Run a task's rollout. Raises McpEnvironmentError if the environment failed: such a rollout has no reward."""
    started = time.monotonic()
    async with open_rollout_resources(task, config) as stage:
        rollout = _Conversation(task, config, policy, stage)
        stop = await rollout.run(started)
        done = await grade_rollout(task, config, stage, rollout.played())
    counts = rollout.counts
    parts = {
        "task_completion": done.score,
        "tool_execution": counts.successes / counts.attempts if counts.attempts else 0.0,
        "format_compliance": fmean(counts.format_scores) if counts.format_scores else 0.0,
    }
    return Outcome(
        reward=score(parts, config.rubric.weights),
        components={**done.components, **parts, **_counted(counts), **stage.workdir.metrics},
        stop_reason=stop,
        explanations=done.explanations | ({SERVER_LOST: "; ".join(counts.lost)} if counts.lost else {}),
    )


def first_messages(task: McpTask, config: GymConfig, state: str = "") -> list[Message]:
    """Return the conversation before the first turn. `state` is the setup's output, added to the prompt."""
    prompt = f"{task.prompt}\n\n{state}" if state else task.prompt
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    return [*system, {"role": "user", "content": prompt}]


class _Conversation:
    """Turns of one rollout."""

    def __init__(self, task: McpTask, config: GymConfig, policy: Policy, stage: RolloutResources) -> None:
        self._task, self._config, self._policy = task, config, policy
        self._stage, self._sessions = stage, stage.sessions
        self._reply_is_graded = any(grader.reply for grader in resolve_graders(task, config))
        self._native = config.parser.format == "tools"
        offered = build_action_tools(config, stage.sessions.tools)
        self._tools: Sequence[Tool] = offered if self._native else ()
        if not self._native and isinstance(policy, ToolAwarePolicy):
            policy.set_tools(offered, call_form(config.parser))
        self._messages = first_messages(task, config, stage.setup_output)
        self._ended: StopReason | None = None
        self._ends = math.inf
        self._said = ""
        self._calls: list[RecordedCall] = []
        self.counts = _Counts()

    async def run(self, started: float) -> StopReason:
        """Run turns until the rollout ends, and return the reason. `started` is in monotonic seconds."""
        limits = self._config.defaults
        self._ends = started + (1 - _FOR_GRADING) * (ROLLOUT_DEADLINE.get() - started)
        last = min(self._ends, started + (limits.time_limit or math.inf))
        for _ in range(limits.max_turns):
            if time.monotonic() >= last:
                return "time_limit"
            reply = await self._policy.chat(self._messages, tools=self._tools)
            if reply.text or reply.finish_reason == "stop":  # an empty reply that was cut off had no room
                self.counts.turns += 1
            parsed = self._parsed(reply)
            self._messages.append(reply.message)
            self._said = parsed.plain
            if reply.finish_reason == "length":
                return "truncated"
            if parsed.is_answer and (self._native or self._may_answer):
                return "answered"
            self._messages += await self._answers(reply, parsed)
            if self._ended is not None:
                return self._ended
        return "turn_limit"

    def played(self) -> FinishedRollout:
        """Return the finished rollout as graders see it."""
        return FinishedRollout(
            task={"id": self._task.id, "prompt": self._task.prompt, "metadata": self._task.metadata},
            messages=self._messages,
            reply=self._said,
            calls=self._calls,
            workdir=self._stage.workdir.path,
            call_tool=self._sessions.call_with_timeout,
        )

    @property
    def _may_answer(self) -> bool:
        """True if text without a call is accepted as an answer, not reported as a missing call."""
        return self._reply_is_graded or self.counts.successes > 0

    def _parsed(self, reply: Reply) -> ParsedReply:
        parser, actions = self._config.parser, self._config.actions
        if self._native:
            parsed = parse_tool_calls(reply.message, parser, actions)
        else:
            parsed = parse_reply(reply.text, parser, actions)
        if reply.text or reply.finish_reason == "stop":
            answers = parsed.is_answer and self._may_answer
            self.counts.format_scores.append(parsed.answer_score if answers else parsed.format_score)
        return parsed

    async def _answers(self, reply: Reply, parsed: ParsedReply) -> list[Message]:
        """Run the calls of a reply and return the next messages: results, and problems of the reply."""
        results: list[tuple[ParsedCall, str]] = []
        for call in parsed.calls:
            results.append((call, await self._run(call)))
            if self._ended is not None:
                break
        if self._native:
            return _native_answers(reply, parsed, results)
        texts = [f"<result>\n{text}\n</result>" for _, text in results]
        texts += [f"Invalid tool call: {problem}" for problem in parsed.problems]
        return [{"role": "user", "content": "\n".join(texts) or _NO_CALL}]

    async def _run(self, call: ParsedCall) -> str:
        """Run a call and return its result as text. Sets the stop reason if the call ends the rollout."""
        try:
            bound = bind_call(call, self._config.actions, self._sessions.schemas)
        except ActionError as error:
            self.counts.attempts += 1
            return f"Error: {error}"
        if bound.tool is None:
            self._ended = "done"
            return "Done."
        self.counts.attempts += 1
        try:
            seconds = min(self._config.defaults.tool_timeout, max(self._ends - time.monotonic(), 0.1))
            result = await self._sessions.call(bound.tool, bound.arguments, timeout=seconds)
        except McpEnvironmentError as fault:
            result = await self._broken(bound.tool, bound.arguments, fault)
        self._calls.append(record_call(bound.tool, bound.arguments, result))
        self.counts.successes += not result.is_error
        data = decode_result(result)
        if isinstance(data, Mapping) and data.get("done") is True:
            self._ended = "environment_done"
        return self._shown(result)

    async def _broken(
        self, tool: str, arguments: Mapping[str, Any], fault: McpEnvironmentError
    ) -> CallResult:
        """Return the result that the model reads if its call broke the server.

        Raises `fault` if a fresh session fails too, because then the environment is at fault.
        """
        known = bool(self.counts.lost) and isinstance(fault, SessionLostError)
        if not known and await find_fresh_session_fault(self._task, self._config) is not None:
            raise fault
        given = ", ".join(f"{name}={format_short(value)}" for name, value in arguments.items())
        ending = f" with {fault.exit_status}" if fault.exit_status else ""
        self.counts.lost.append(f"{tool}({given[:_LONGEST_LOST]}): {fault.to_model}{ending}")
        return CallResult(text=f"Error: {tool}: {fault.to_model}.", is_error=True)

    def _shown(self, result: CallResult) -> str:
        text = result.text or ("" if result.structured is None else json.dumps(result.structured))
        text, cut = truncate_text(text, self._config.defaults.max_result_chars)
        self.counts.cut += cut
        self.counts.dropped.update(result.dropped)
        if result.is_error and not text.lower().startswith("error"):
            text = f"Error: {text}"
        notes = [f"({count} {kind} not shown)" for kind, count in result.dropped.items()]
        return "\n".join([text, *notes] if text else notes or ["(no output)"])


def _native_answers(
    reply: Reply, parsed: ParsedReply, results: Sequence[tuple[ParsedCall, str]]
) -> list[Message]:
    """Return one message per native call, in the order of the calls."""
    texts = {call.call_id: text for call, text in results}
    texts |= {problem.call_id: f"Invalid tool call: {problem}" for problem in parsed.problems}
    return [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["function"]["name"] or "unknown",
            "content": texts.get(call["id"], _NOT_RUN),
        }
        for call in reply.message["tool_calls"]
    ]


def _counted(counts: _Counts) -> dict[str, float]:
    numbers: dict[str, Any] = {
        "n_turns": counts.turns,
        "tool_calls": counts.attempts,
        "tool_errors": counts.attempts - counts.successes,
        SERVER_LOST: len(counts.lost),
    }
    if counts.cut:
        numbers["cut_characters"] = counts.cut
    numbers |= {f"dropped_{kind}": count for kind, count in counts.dropped.items()}
    return {name: float(number) for name, number in numbers.items()}
