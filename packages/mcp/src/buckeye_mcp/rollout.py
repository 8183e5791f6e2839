"""One rollout: sessions, setup, the conversation, and the evaluation, which always takes place."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from buckeye.envs.base import Message, Outcome, Policy, Reply, TextCaller, Tool
from buckeye_mcp.actions.mapping import ActionError, bind
from buckeye_mcp.actions.parser import ParsedCall, ParsedReply, parse_reply, parse_tool_calls
from buckeye_mcp.actions.tool_list import call_form, offered_tools
from buckeye_mcp.client.errors import EvaluateError, McpFault, SetupError, StartError
from buckeye_mcp.client.session import CallResult, Deadlines
from buckeye_mcp.client.sessions_of_rollout import Sessions, open_sessions
from buckeye_mcp.config import GymConfig
from buckeye_mcp.rewards import result_object, reward_of, score
from buckeye_mcp.tasks.task_schema import McpTask, ToolCall, call_arguments
from buckeye_mcp.workdir.folder import open_workdir

StopReason = Literal["done", "answered", "environment_done", "turn_limit", "time_limit", "truncated"]
"""`done`: the model called an action without a tool. `answered`: a reply without calls where native tool
calls are used. `environment_done`: a result said `done: true`. `turn_limit`, `time_limit`: of the
configuration. `truncated`: a reply was cut off at a length limit."""

_LISTEN_SECONDS = 60.0  # `setup_timeout` may end it before
_NO_CALL = "Your reply has no tool call. Write one, as <tool>name(...)</tool>."
_NOT_RUN = "Not run: only the first call of a reply is."


@dataclass(slots=True)
class _Counts:
    """What happened in a rollout."""

    turns: int = 0
    attempts: int = 0
    successes: int = 0
    format_scores: list[float] = field(default_factory=list)
    cut: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


async def play(task: McpTask, config: GymConfig, policy: Policy) -> Outcome:
    """Play a task. Raises McpFault if the environment failed; the rollout has no reward then."""
    limits = config.defaults
    started = time.monotonic()
    deadlines = Deadlines(start=limits.setup_timeout, call=limits.tool_timeout, listen=_LISTEN_SECONDS)
    async with (
        open_workdir(task, config) as workdir,
        open_sessions(task, deadlines, preload=limits.preload, workdir=workdir) as sessions,
    ):
        _check_actions(config, sessions)
        state = await _set_up(task, config, sessions)
        rollout = _Conversation(task, config, policy, sessions, state)
        stop = await rollout.run(started)
        reward, numbers = await _evaluate(task, config, sessions)
    counts = rollout.counts
    parts = {
        "task_completion": reward,
        "tool_execution": counts.successes / counts.attempts if counts.attempts else 0.0,
        "format_compliance": _mean(counts.format_scores),
    }
    return Outcome(
        reward=score(parts, config.rubric.weights),
        components={**numbers, **parts, **_counted(counts), **workdir.numbers},
        stop_reason=stop,
    )


def first_messages(task: McpTask, config: GymConfig, state: str = "") -> list[Message]:
    """The conversation before the model's first turn; `state` is what the setup said."""
    prompt = f"{task.prompt}\n\n{state}" if state else task.prompt
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    return [*system, {"role": "user", "content": prompt}]


class _Conversation:
    """The turns of one rollout."""

    def __init__(
        self, task: McpTask, config: GymConfig, policy: Policy, sessions: Sessions, state: str
    ) -> None:
        self._config = config
        self._policy = policy
        self._sessions = sessions
        self._native = config.parser.format == "tools"
        self._tools: Sequence[Tool] = offered_tools(config, sessions.tools) if self._native else ()
        if not self._native and isinstance(policy, TextCaller):
            policy.may_call(offered_tools(config, sessions.tools), call_form(config.parser))
        self._messages = first_messages(task, config, state)
        self._ended: StopReason | None = None
        self.counts = _Counts()

    async def run(self, started: float) -> StopReason:
        """Turns until one of the reasons to stop; `started` is when the rollout began (monotonic)."""
        limits = self._config.defaults
        for _ in range(limits.max_turns):
            if limits.time_limit is not None and time.monotonic() - started >= limits.time_limit:
                return "time_limit"
            reply = await self._policy.chat(self._messages, tools=self._tools)
            if reply.text or reply.finish_reason == "stop":  # else there was no room for a reply at all
                self.counts.turns += 1
            parsed = self._parsed(reply)
            if reply.finish_reason == "length":
                return "truncated"
            if self._native and not reply.message.get("tool_calls"):
                return "answered"
            self._messages.append(reply.message)
            self._messages += await self._answers(reply, parsed)
            if self._ended is not None:
                return self._ended
        return "turn_limit"

    def _parsed(self, reply: Reply) -> ParsedReply:
        parser, actions = self._config.parser, self._config.actions
        parsed = (
            parse_tool_calls(reply.message, parser, actions)
            if self._native
            else parse_reply(reply.text, parser, actions)
        )
        if reply.text or reply.finish_reason == "stop":
            self.counts.format_scores.append(parsed.format_score)
        return parsed

    async def _answers(self, reply: Reply, parsed: ParsedReply) -> list[Message]:
        """What the model reads after its reply: the results of its calls, and what is wrong with it."""
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
        """The text of a call's result; also notes whether the rollout is over."""
        try:
            bound = bind(call, self._config.actions, self._sessions.schemas)
        except ActionError as error:
            self.counts.attempts += 1
            return f"Error: {error}"
        if bound.tool is None:
            self._ended = "done"
            return "Done."
        self.counts.attempts += 1
        result = await self._sessions.call(
            bound.tool, bound.arguments, timeout=self._config.defaults.tool_timeout
        )
        self.counts.successes += not result.is_error
        data = result_object(result)
        if isinstance(data, Mapping) and data.get("done") is True:
            self._ended = "environment_done"
        return self._shown(result)

    def _shown(self, result: CallResult) -> str:
        text = result.text or ("" if result.structured is None else json.dumps(result.structured))
        text, cut = bounded(text, self._config.defaults.max_result_chars)
        self.counts.cut += cut
        self.counts.dropped.update(result.dropped)
        if result.is_error and not text.lower().startswith("error"):
            text = f"Error: {text}"
        notes = [f"({count} {kind} not shown)" for kind, count in result.dropped.items()]
        return "\n".join([text, *notes] if text else notes or ["(no output)"])


def bounded(text: str, most: int) -> tuple[str, int]:
    """The first `most` characters, with a note of how many were cut; and that number."""
    cut = max(0, len(text) - most)
    return (f"{text[:most]}\n(cut: {cut} more characters)" if cut else text), cut


def _native_answers(
    reply: Reply, parsed: ParsedReply, results: Sequence[tuple[ParsedCall, str]]
) -> list[Message]:
    """One message for every native call, in the order of the calls."""
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


def _check_actions(config: GymConfig, sessions: Sessions) -> None:
    for action in config.actions.values():
        if action.tool is not None and action.tool not in sessions.tools:
            known = ", ".join(sorted(sessions.tools)) or "none"
            raise StartError(
                f"action_mappings.{action.name}: no server has a tool {action.tool!r}; there are: {known}"
            )


async def _set_up(task: McpTask, config: GymConfig, sessions: Sessions) -> str:
    """Run the setup calls; what they said, for the prompt."""
    said = []
    for call in task.setup_tool:
        try:
            result = await _fixed_call(call, sessions, config.defaults.setup_timeout)
        except McpFault as fault:
            raise SetupError(f"setup_tool {call.name}: {fault}") from fault
        if result.is_error:
            raise SetupError(f"setup_tool {call.name} failed: {result.text[:500]}")
        said.append(result.text)
    return bounded("\n".join(text for text in said if text), config.defaults.max_result_chars)[0]


async def _evaluate(task: McpTask, config: GymConfig, sessions: Sessions) -> tuple[float, dict[str, float]]:
    """The reward of the last evaluation call and its other numbers."""
    outcome: tuple[float, dict[str, float]] = 0.0, {}
    for call in task.evaluate_tool:
        try:
            result = await _fixed_call(call, sessions, config.defaults.tool_timeout)
        except McpFault as fault:
            raise EvaluateError(f"evaluate_tool {call.name}: {fault}") from fault
        outcome = reward_of(f"evaluate_tool {call.name}", result)
    return outcome


async def _fixed_call(call: ToolCall, sessions: Sessions, timeout: float) -> CallResult:
    """A call of the task itself."""
    if call.name not in sessions.tools:
        known = ", ".join(sorted(sessions.tools)) or "none"
        raise StartError(f"no server has this tool; there are: {known}")
    arguments = call_arguments(call, sessions.tools[call.name].input_schema)
    return await sessions.call(call.name, arguments, timeout=timeout)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _counted(counts: _Counts) -> dict[str, float]:
    numbers: dict[str, Any] = {
        "n_turns": counts.turns,
        "tool_calls": counts.attempts,
        "tool_errors": counts.attempts - counts.successes,
    }
    if counts.cut:
        numbers["cut_characters"] = counts.cut
    numbers |= {f"dropped_{kind}": count for kind, count in counts.dropped.items()}
    return {name: float(number) for name, number in numbers.items()}
