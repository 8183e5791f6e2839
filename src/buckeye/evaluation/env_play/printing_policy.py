"""Print one rollout while it runs, and record it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from buckeye.base.columns import counted
from buckeye.base.json_lines import printable
from buckeye.envs.base import (
    DEFAULT_OPTIONS,
    CallOptions,
    GroupEnvironment,
    Message,
    OptionsPolicy,
    Outcome,
    Policy,
    Reply,
    Task,
    Tool,
    ToolAwarePolicy,
)
from buckeye.monitor.conversation import content_text
from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.group_scoring import score_pending_outcomes
from buckeye.orchestrator.rollout_runner import run_rollout


class PrintingPolicy(OptionsPolicy):
    """Policy that forwards calls to the policy `speaker` and prints the conversation."""

    def __init__(self, speaker: Policy, say: Callable[[str], None]) -> None:
        self._speaker, self._say = speaker, say
        self.messages: list[Message] = []
        self.tools: Sequence[Tool] = ()
        self.turns = 0

    def set_tools(self, tools: Sequence[Tool], form: str) -> None:
        """Forward the callable tools and the text form of a call to the speaker, if it accepts them."""
        if isinstance(self._speaker, ToolAwarePolicy):
            self._speaker.set_tools(tools, form)

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> Reply:
        """Return the speaker's reply. Options are ignored if the speaker does not support them."""
        self._show_prompt(messages)
        if isinstance(self._speaker, OptionsPolicy):
            reply = await self._speaker.ask(messages, tools=tools, options=options)
        else:
            reply = await self._speaker.chat(messages, tools=tools)
        self._say(shown_message(reply.message))
        if options.trained:
            self.turns += 1
            self.messages, self.tools = [*messages, reply.message], tools
        return reply

    def _show_prompt(self, messages: Sequence[Message]) -> None:
        known = len(self.messages)
        continues = list(messages[:known]) == self.messages
        for message in messages[known if continues else 0 :]:
            self._say(shown_message(message))


def shown_message(message: Message) -> str:
    """Return the text of a message with its role and tool calls."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    lines = [f"[{message['role']}]", *filter(None, [content_text(message.get("content"))])]
    return printable("\n".join([*lines, *(f"{call['name']}({call['arguments']})" for call in calls)]))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayRecord:
    """Record of one finished rollout."""

    env: str
    task: Task
    policy: str
    outcome: Outcome
    turns: int
    seconds: float
    messages: Sequence[Message]
    tools: Sequence[Tool]

    def to_json(self) -> dict[str, Any]:
        """Return the whole record as JSON values."""
        outcome = self.outcome
        return {
            "env": self.env,
            "task_id": self.task.id,
            "policy": self.policy,
            "reward": outcome.reward,
            "components": dict(outcome.components),
            "explanations": dict(outcome.explanations),
            "stop_reason": outcome.stop_reason,
            "error": outcome.error,
            "turns": self.turns,
            "seconds": round(self.seconds, 3),
            **self.chat(),
        }

    def chat(self) -> dict[str, Any]:
        """Return the conversation in the format of `sft`."""
        return {"messages": list(self.messages), **({"tools": list(self.tools)} if self.tools else {})}

    def lines(self) -> Iterator[str]:
        """Yield lines with the reward, the stop reason and the components of the reward."""
        outcome, turns = self.outcome, counted(self.turns, "turn")
        if outcome.reward is None:
            yield printable(f"no reward: {outcome.error}")
            return
        yield f"reward {outcome.reward:.4f}, ended by {outcome.stop_reason} after {turns}"
        explained = outcome.explanations
        names = dict.fromkeys([*outcome.components, *explained])
        width = max(map(len, names), default=0)
        for name in names:
            value = outcome.components.get(name)
            figure = "" if value is None else f"{value:g}"
            yield printable(f"  {name:<{width}}  {figure:<7} {explained.get(name, '')}").rstrip()


async def run_and_record(
    env: NamedEnvironment, task: Task, policy: PrintingPolicy, name: str, *, timeout: float
) -> PlayRecord:
    """Run one rollout with the policy named `name`, for at most `timeout` seconds."""
    started, environment = time.monotonic(), env.environment
    run = environment.rollout_in_group if isinstance(environment, GroupEnvironment) else environment.rollout
    outcome = await run_rollout(lambda: run(task, policy), timeout, environment)
    if isinstance(environment, GroupEnvironment):
        (outcome,) = await score_pending_outcomes(
            environment, task, [outcome], [policy.turns], timeout=timeout
        )
    return PlayRecord(
        env=env.name,
        task=task,
        policy=name,
        outcome=outcome,
        turns=policy.turns,
        seconds=time.monotonic() - started,
        messages=policy.messages,
        tools=policy.tools,
    )
