"""Sessions of an environment with repeatable replies. A session is one rollout and all that it read."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from buckeye.envs.base import Environment, Message, Outcome, Probe, Reply, Task, Tool
from buckeye.evaluation.checks.result import shortened
from buckeye.evaluation.checks.task_text import (
    accepted_answers,
    answer_formats,
    apply_format,
    prompt_of,
    question_of,
)
from buckeye.evaluation.env_play.random_policy import RandomPolicy
from buckeye.mcp.isolation.compare import mask_noise
from buckeye.monitor.conversation import content_text
from buckeye.orchestrator.rollout_runner import run_rollout

SESSION_SECONDS = 60.0
MAX_TURNS = 20
PLANNED_TASKS = 25
_SHOWN_MOVE = re.compile(r"<([A-Za-z]\w*)>[^<>\n]{1,80}</\1>|\[[^\[\]\n]{1,40}\]")
_OWN_TROUBLE = ("timeout", "worker", "model")
"""Boundaries of errors that a busy machine can cause. A session with such an error is not compared."""
_HARD_TEXTS = (40 * "a" + "!", 40 * "1" + "!", 40 * " " + "!", 20 * "a " + "!", 20 * "1," + "!")
_NOT_COMPARED = re.compile(r".*(?:seconds|bytes|duration|latency|_time|_ms|_tokens|_cost)")

DifferenceKind = Literal["text", "reward", "component"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Task of a session, its first reply, and the seed of all later replies."""

    task: Task
    first: str
    seed: int


@dataclass(frozen=True, slots=True)
class Session:
    """Finished session: the conversation before each reply, the replies, and the outcome."""

    plan: Plan
    read: Sequence[str]
    replies: Sequence[Message]
    outcome: Outcome

    @property
    def is_comparable(self) -> bool:
        """True if the environment alone decided how the session ended."""
        return self.outcome.error is None or self.outcome.boundary not in _OWN_TROUBLE


@dataclass(frozen=True, slots=True)
class Difference:
    """First difference of two sessions of a plan."""

    kind: DifferenceKind
    text: str


class PlannedPolicy:
    """Policy with the replies of a plan. Each reply takes `seconds`."""

    def __init__(self, plan: Plan, seconds: float = 0.0) -> None:
        self.read: list[str] = []
        self.replies: list[Message] = []
        self.plan, self._seconds = plan, seconds
        self._rng, self._calls = random.Random(plan.seed), RandomPolicy(plan.seed)  # noqa: S311  not for security

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Return a random call of a tool, the first reply of the plan, or a move that the messages show."""
        shown = [[dict(message) for message in messages], [dict(tool) for tool in tools]]
        self.read.append(json.dumps(shown, sort_keys=True, ensure_ascii=False, default=str))
        await asyncio.sleep(self._seconds)
        reply = await self._calls.chat(messages, tools=tools) if tools else self._text_reply(messages)
        self.replies.append(reply.message)
        return reply

    def _text_reply(self, messages: Sequence[Message]) -> Reply:
        shown = "\n".join(content_text(message.get("content")) for message in messages)
        text = self.plan.first if not self.replies else self._move(shown)
        return Reply(text=text, finish_reason="stop", message={"role": "assistant", "content": text})

    def _move(self, conversation: str) -> str:
        moves = [match[0] for match in _SHOWN_MOVE.finditer(conversation)] or [self.plan.first]
        move = self._rng.choice(list(dict.fromkeys(moves)))
        if self._rng.random() < 0.5:
            return re.sub(r"\d", lambda _: str(self._rng.randrange(10)), move)
        return move


def make_plans(tasks: Sequence[Task], probes: Sequence[Probe], count: int) -> list[Plan]:
    """Return at most `count` plans: right and wrong answers in the usual format, the question, no answer."""
    tasks, form = tasks[:PLANNED_TASKS], _answer_format(tasks, probes)
    answers = [next(iter(accepted_answers(task)), str(number)) for number, task in enumerate(tasks)]
    plans = [Plan(probe.task, probe.reply, 0) for probe in probes[:PLANNED_TASKS]]
    for number, task in enumerate(tasks):
        other = answers[(number + 1) % len(tasks)]
        firsts = [apply_format(form, answers[number]), apply_format(form, other), question_of(task), ""]
        plans += [Plan(task, first, seed) for seed, first in enumerate(firsts)]
    return plans[:count]


def make_hard_plans(tasks: Sequence[Task], probes: Sequence[Probe]) -> list[Plan]:
    """Return plans whose first reply takes a careless regular expression exponential time."""
    forms = dict.fromkeys([None, _answer_format(tasks, probes)])
    return [Plan(tasks[0], apply_format(form, text), 0) for form in forms for text in _HARD_TEXTS]


def _answer_format(tasks: Sequence[Task], probes: Sequence[Probe]) -> str | None:
    shown = [*map(prompt_of, tasks[:PLANNED_TASKS]), *(probe.reply for probe in probes)]
    return next(iter(answer_formats(shown)), None)


async def run_sessions(
    environment: Environment, plans: Sequence[Plan], *, at_once: int, deadline: float, seconds: float = 0.0
) -> list[Session | None]:
    """Run a session for each plan, `at_once` side by side. None: the session did not start before `deadline`.

    Each reply takes `seconds`.
    """
    slots = asyncio.Semaphore(at_once)

    async def run(plan: Plan) -> Session | None:
        async with slots:
            left = deadline - time.monotonic()
            return await run_session(environment, PlannedPolicy(plan, seconds)) if left > 0 else None

    return await asyncio.gather(*map(run, plans))


async def run_session(
    environment: Environment, policy: PlannedPolicy, limit: float = SESSION_SECONDS
) -> Session:
    """Run one session. After `limit` seconds, cancel it."""
    task = policy.plan.task
    outcome = await run_rollout(lambda: environment.rollout(task, policy), limit, environment)
    return Session(policy.plan, policy.read, policy.replies, outcome)


def first_difference(one: Session, other: Session) -> Difference | None:
    """Return the first difference in texts, reward or components, except clocks, random ids and durations."""
    for turn, (left, right) in enumerate(zip_longest(one.read, other.read, fillvalue="(ended)"), start=1):
        if left != right and mask_noise(left) != mask_noise(right):
            at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), 0)
            texts = " / ".join(repr(shortened(text[max(0, at - 20) :], 60)) for text in (left, right))
            return Difference("text", f"{one.plan.task.id}, turn {turn}: {texts}")
    first, second = _grade(one.outcome), _grade(other.outcome)
    if first != second:
        return Difference("reward", f"{one.plan.task.id}: {first} / {second}")
    first, second = (_components(session.outcome.components) for session in (one, other))
    return None if first == second else Difference("component", f"{one.plan.task.id}: {first} / {second}")


def _grade(outcome: Outcome) -> str:
    if outcome.error is not None:
        return mask_noise(f"error {outcome.error}")
    return f"reward {outcome.reward:.9g} ({outcome.stop_reason})"


def _components(components: Mapping[str, float]) -> str:
    compared = {name: value for name, value in components.items() if not _NOT_COMPARED.fullmatch(name)}
    return ", ".join(f"{name} {value:.9g}" for name, value in sorted(compared.items()))
