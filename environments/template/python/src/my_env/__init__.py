"""Environment with one question, one reply and one grade. Train and eval have different tasks."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from buckeye.envs.base import Outcome, Probe, Reply, Task
from buckeye.envs.single_turn import SingleTurnEnvironment

_ANSWER = re.compile(r"<answer>([^<]*)</answer>")
_TRAIN, _EVAL = 900, 100


class MyEnv(SingleTurnEnvironment):
    """Environment that asks for the sum of two numbers."""

    def __init__(self) -> None:
        pairs = random.Random(0).sample(
            [(a, b) for a in range(100, 1000) for b in range(100, 1000)], _TRAIN + _EVAL
        )
        tasks = [_task(a, b) for a, b in pairs]
        super().__init__("my-env", {"train": tasks[:_TRAIN], "eval": tasks[_TRAIN:]})

    def grade(self, task: Task, reply: Reply) -> Outcome:
        """Return reward 1 for the right answer in its tag, given once; 0 for anything else."""
        answers = _ANSWER.findall(reply.text)
        right = len(answers) == 1 and answers[0].strip() == task.data["accept"][0]
        return Outcome(reward=float(right), components={"answered": float(len(answers) == 1)})

    def probes(self) -> Sequence[Probe]:
        """Return replies whose reward is known; `buckeye env check` grades them."""
        task = self.tasks("eval")[0]
        answer = task.data["accept"][0]
        both = f"<answer>{answer}</answer> <answer>7</answer>"
        return [
            Probe(name="right", task=task, reply=f"<answer>{answer}</answer>", low=1.0, high=1.0),
            Probe(
                name="right, with spaces", task=task, reply=f"<answer> {answer} </answer>", low=1.0, high=1.0
            ),
            Probe(name="no tag", task=task, reply=answer, low=0.0, high=0.0),
            Probe(name="two answers", task=task, reply=both, low=0.0, high=0.0),
            Probe(name="nothing", task=task, reply="", low=0.0, high=0.0),
        ]


def _task(a: int, b: int) -> Task:
    question = f"What is {a} + {b}? Write the number as <answer>...</answer>."
    return Task(
        id=f"{a}+{b}",
        messages=({"role": "user", "content": question},),
        data={"accept": [str(a + b)], "family": "sum"},
    )


def load_environment() -> MyEnv:
    """Return the environment for `id = "my-env"`. Its arguments become `args` in the orchestrator file."""
    return MyEnv()
