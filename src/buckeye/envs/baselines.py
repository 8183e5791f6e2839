"""What a policy without any content scores: the floor that a learning curve has to be read against."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from buckeye.envs.base import Environment, Message, Outcome, Reply, Task, Tool

_ANSWERS_TRIED = 5


@dataclass(frozen=True, slots=True)
class ScriptedPolicy:
    """A policy that is a function of the conversation; no model, no tokens."""

    answer: Callable[[Sequence[Message]], str]

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Reply with what the function returns."""
        del tools
        text = self.answer(messages)
        return Reply(text=text, finish_reason="stop", message={"role": "assistant", "content": text})


async def play_scripted(
    environment: Environment, tasks: Sequence[Task], answer: Callable[[Sequence[Message]], str]
) -> list[Outcome]:
    """Play every task once with a scripted policy."""
    policy = ScriptedPolicy(answer)
    return [await environment.rollout(task, policy) for task in tasks]


async def best_content_free_score(environment: Environment, *, split: str, sample: int = 500) -> float:
    """The share of a split's tasks that the best content-free policy solves (reward >= 1).

    Tried: no answer, the quoted part of the prompt again, and the answers most often right in the train split
    (chosen there, so that the split measured does not choose its own constant).
    """
    train = environment.tasks("train")
    common = Counter(
        answer for i in range(min(sample, len(train))) for answer in train[i].data.get("accept", ())
    )
    constants = [answer for answer, _ in common.most_common(_ANSWERS_TRIED)]
    policies: list[Callable[[Sequence[Message]], str]] = [
        lambda _: "",
        _echo,
        *(_constant(answer) for answer in constants),
    ]
    held_out = environment.tasks(split)
    tasks = [held_out[i] for i in range(len(held_out))]
    scores = []
    for policy in policies:
        outcomes = await play_scripted(environment, tasks, policy)
        solved = sum(o.reward is not None and o.reward >= 1.0 for o in outcomes)
        scores.append(solved / len(tasks))
    return max(scores)


def _constant(answer: str) -> Callable[[Sequence[Message]], str]:
    return lambda _: f"<answer>{answer}</answer>"


def _echo(messages: Sequence[Message]) -> str:
    quoted = re.search(r'"([^"]+)"', str(messages[-1]["content"]))
    return f"<answer>{quoted.group(1) if quoted else ''}</answer>"
