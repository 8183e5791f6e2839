"""Classic environment of verifiers with a judge that prefers long replies, and a rule."""

from types import SimpleNamespace

import verifiers as vf
from datasets import Dataset


class LongIsRight:
    """Stand-in for a client of a judge model: it says yes to prompts with long responses."""

    def __init__(self):
        self.chat = SimpleNamespace(completions=self)

    async def create(self, messages, **_):
        text = "yes" if len(messages[0]["content"]) > 600 else "no"
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text))])


async def approved(judge, prompt, completion, answer, state):
    return float(await judge(prompt, completion, answer, state) == "yes")


def short(completion):
    return float(len(completion[-1]["content"]) < 50)


def load_environment():
    rows = [{"question": f"What comes after {number}?", "answer": str(number + 1)} for number in range(20)]
    rubric = vf.JudgeRubric(judge_client=LongIsRight())
    rubric.add_reward_func(approved)
    rules = vf.Rubric(funcs=[short], weights=[0.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.RubricGroup([rubric, rules]))
