import asyncio

import pytest

from buckeye.envs.base import Environment, Outcome, Reply, Task
from buckeye.envs.single_turn import SingleTurnEnvironment

TASK = Task(id="1", messages=({"role": "user", "content": "Say yes."},), data={"accept": ("yes",)})


class Toy(SingleTurnEnvironment):
    def __init__(self):
        super().__init__("toy", {"train": [TASK], "eval": []})

    def grade(self, task, reply):
        return Outcome(reward=float(reply.text in task.data["accept"]))


class Saying:
    def __init__(self, text, finish_reason="stop"):
        self.seen = []
        self._reply = Reply(
            text=text, finish_reason=finish_reason, message={"role": "assistant", "content": text}
        )

    async def chat(self, messages, *, tools=()):
        self.seen.append(messages)
        return self._reply


@pytest.mark.parametrize(("text", "reward"), [("yes", 1.0), ("no", 0.0)])
def test_it_asks_once_and_grades(text, reward):
    policy = Saying(text)
    assert asyncio.run(Toy().rollout(TASK, policy)).reward == reward
    assert policy.seen == [TASK.messages]
    assert isinstance(Toy(), Environment)


def test_an_unknown_split_is_a_key_error_naming_the_others():
    with pytest.raises(KeyError, match="train, eval"):
        Toy().tasks("test")
