"""Environment of one reply: write the letter e. The reward is the share of its characters that are e."""

import json
import random
from pathlib import Path

from buckeye.envs.base import Outcome, Task

QUESTION = {"role": "user", "content": "Write the letter e many times."}
LETTERS = "etaoinsr"


class Letters:
    """Environment with one task."""

    name = "letters"
    splits = ("train",)

    def tasks(self, split):
        """Return the tasks of a split."""
        return [Task(id="e", messages=(QUESTION,))]

    async def rollout(self, task, policy):
        """Ask for one reply, and score it."""
        text = (await policy.chat(task.messages)).text.strip()
        return Outcome(reward=text.count("e") / max(1, len(text)))


def load_environment():
    """Return the environment. `id = "task.py"` calls this function."""
    return Letters()


def main():
    """Write chats of a beginner to `outputs/`: eight random letters."""
    draw, out = random.Random(0), Path("outputs")
    out.mkdir(exist_ok=True)
    with open(out / "chats.jsonl", "w") as chats:
        for _ in range(1_200):
            attempt = {"role": "assistant", "content": "".join(draw.choices(LETTERS, k=8))}
            chats.write(json.dumps({"messages": [QUESTION, attempt]}) + "\n")


if __name__ == "__main__":
    main()
