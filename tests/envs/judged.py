"""Environment with a judge, which is unbiased or has one planted bias; loaded by its path."""

from buckeye.envs.base import Outcome, Task
from buckeye.envs.single_turn import SingleTurnEnvironment

NAMES = [f"{first}{second}" for first in "abcde" for second in "vwxyz"]


class Judged(SingleTurnEnvironment):
    judged = ("quality",)

    def __init__(self, bias):
        tasks = [
            Task(
                id=name,
                messages=({"role": "user", "content": f"Which name has number {number}?"},),
                data={"answer": name},
            )
            for number, name in enumerate(NAMES)
        ]
        self.bias = bias
        super().__init__("judged", {"train": tasks})

    def grade(self, task, reply):
        right = float(task.data["answer"] in reply.text)
        quality = 0.5 * right
        if self.bias == "length":
            quality += 0.25 * (len(reply.text) > 300)
        return Outcome(reward=quality, components={"quality": quality, "words": len(reply.text.split())})

    async def compare(self, task, first, second):
        if self.bias == "broken":
            raise RuntimeError("the judge is away")
        if self.bias == "first" or (self.bias == "sometimes first" and NAMES.index(task.id) % 2):
            return 1.0
        scores = [float(task.data["answer"] in reply) for reply in (first, second)]
        return (1.0 + scores[0] - scores[1]) / 2


def load_environment(bias=""):
    return Judged(bias)
