"""Tasks on a few letters: questions and rewards of answers.

Standard library only, so that every contender of a comparison can import it. Buckeye uses `load_environment`.

    emit     "Write the letter e many times.": the share of the answer's characters that are this letter
    reverse  "Reverse the string abca": the share of its characters that are in the right position
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

LETTERS = "etaoinsr"


def questions(task: str, count: int, *, letters: str = LETTERS, seed: int = 0) -> list[tuple[str, str]]:
    """Return (question, wanted) pairs."""
    draw = random.Random(seed)
    if task == "emit":
        wanted = [draw.choice(letters) for _ in range(count)]
        return [(f"Write the letter {letter} many times.", letter) for letter in wanted]
    strings = ["".join(draw.choice("abcd") for _ in range(4)) for _ in range(count)]
    return [(f"Reverse the string {string}", string[::-1]) for string in strings]


def reward(task: str, answer: str, wanted: str) -> float:
    """Return the reward of an answer, from 0 to 1."""
    answer = answer.strip()
    if task == "emit":
        return answer.count(wanted) / max(1, len(answer))
    return sum(a == b for a, b in zip(answer, wanted, strict=False)) / len(wanted)


class Latency:
    """Log-normal latency of an environment in seconds; a `median` of 0 disables it."""

    def __init__(self, median: float, sigma: float, seed: int) -> None:
        self._median, self._sigma, self._draw = median, sigma, random.Random(seed)

    async def wait(self) -> None:
        """Sleep for one random latency."""
        if self._median:
            await asyncio.sleep(self._median * math.exp(self._sigma * self._draw.gauss(0.0, 1.0)))


def load_environment(
    task: str = "emit",
    letters: str = LETTERS,
    count: int = 512,
    seed: int = 0,
    latency: float = 0.0,
    sigma: float = 0.8,
) -> Any:
    """Return the tasks as a Buckeye environment with the split `train`."""
    from buckeye.envs.base import Outcome, Policy, Task

    pause = Latency(latency, sigma, seed)
    tasks = [
        Task(id=f"{task}-{i}", messages=({"role": "user", "content": question},), data={"wanted": wanted})
        for i, (question, wanted) in enumerate(questions(task, count, letters=letters, seed=seed))
    ]

    class Letters:
        name = "letters"
        splits = ("train",)

        def tasks(self, split: str) -> list[Task]:
            return {"train": tasks}[split]

        async def rollout(self, one: Task, policy: Policy) -> Outcome:
            reply = await policy.chat(one.messages)
            await pause.wait()
            return Outcome(reward=reward(task, reply.text, one.data["wanted"]))

    return Letters()
