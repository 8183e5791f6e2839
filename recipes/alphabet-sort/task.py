"""Environment of two turns: sort letters, then again with more. The reward is the share of right places."""

import json
import random
from pathlib import Path

from buckeye.envs.base import Outcome, Task

LETTERS, FIRST, MORE = "abcdefgh", 3, 1
KNOWN = 0.6  # share of letters that the beginner puts in the right place


def questions(letters):
    """Return the texts of both turns."""
    return f'Sort "{letters[:FIRST]}"', f'Also "{letters[FIRST:]}"'


def answers(letters):
    """Return the right replies of both turns."""
    return tuple("".join(sorted(part)) for part in (letters[:FIRST], letters))


def draw_letters(count, seed):
    """Return texts of different letters."""
    draw = random.Random(seed)
    return ["".join(draw.sample(LETTERS, FIRST + MORE)) for _ in range(count)]


class AlphabetSort:
    """Environment with 1,000 tasks."""

    name = "alphabet-sort"
    splits = ("train",)

    def tasks(self, split):
        """Return the tasks of a split."""
        return [
            Task(
                id=str(number),
                messages=({"role": "user", "content": questions(letters)[0]},),
                data={"letters": letters},
            )
            for number, letters in enumerate(draw_letters(1_000, seed=0))
        ]

    async def rollout(self, task, policy):
        """Ask both questions. Each reply has a reward, and their sum is the reward of the rollout."""
        messages, rewards = list(task.messages), []
        for answer in answers(task.data["letters"]):
            reply = await policy.chat(messages)
            text = reply.text.removeprefix("<answer>").removesuffix("</answer>")
            right = sum(a == b for a, b in zip(text, answer))
            rewards.append(right / max(len(text), len(answer)) / 2)
            messages += [reply.message, {"role": "user", "content": questions(task.data["letters"])[1]}]
        return Outcome(reward=sum(rewards), turn_rewards=rewards)


def load_environment():
    """Return the environment. `id = "task.py"` calls this function."""
    return AlphabetSort()


def main():
    """Write chats of a beginner to `outputs/`."""
    draw, out = random.Random(0), Path("outputs")
    out.mkdir(exist_ok=True)
    with open(out / "chats.jsonl", "w") as chats:
        for letters in draw_letters(4_000, seed=1):
            chat = []
            for question, answer in zip(questions(letters), answers(letters)):
                attempt = "".join(a if draw.random() < KNOWN else draw.choice(LETTERS) for a in answer)
                chat.append({"role": "user", "content": question})
                chat.append({"role": "assistant", "content": f"<answer>{attempt}</answer>"})
            chats.write(json.dumps({"messages": chat}) + "\n")


if __name__ == "__main__":
    main()
