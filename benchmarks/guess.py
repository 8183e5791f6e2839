"""Game of several turns: guess one of a few letters, with as many turns as letters."""

from __future__ import annotations

import random
from typing import Any

LETTERS = "eta"
QUESTION = f"Guess a letter: {', '.join(LETTERS)}"


def load_environment() -> Any:
    """Return the game as a Buckeye environment with the split `train`. A reward is 1 or 0."""
    from buckeye.envs.base import Outcome, Policy, Task

    draw, asked = random.Random(0), ({"role": "user", "content": QUESTION},)
    tasks = [Task(id=str(i), messages=asked, data={"wanted": draw.choice(LETTERS)}) for i in range(512)]

    class Guess:
        name = "guess"
        splits = ("train",)

        def tasks(self, split: str) -> list[Task]:
            return {"train": tasks}[split]

        async def rollout(self, one: Task, policy: Policy) -> Outcome:
            messages = list(one.messages)
            for _ in LETTERS:
                reply = await policy.chat(messages)
                if reply.text.strip() == one.data["wanted"]:
                    return Outcome(reward=1.0)
                messages += [reply.message, {"role": "user", "content": "no"}]
            return Outcome(reward=0.0)

    return Guess()
