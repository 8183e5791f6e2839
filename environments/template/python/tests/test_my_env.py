"""Hand-computed grades."""

import pytest
from my_env import load_environment

from buckeye.envs.base import Reply


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("<answer>{right}</answer>", 1.0),
        ("I add them: <answer>{right}</answer>", 1.0),
        ("{right}", 0.0),
        ("<answer>{right}</answer><answer>1</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_grades(reply, reward):
    environment = load_environment()
    task = environment.tasks("train")[0]
    a, b = task.id.split("+")
    text = reply.format(right=int(a) + int(b))
    assert (
        environment.grade(
            task, Reply(text=text, finish_reason="stop", message={"role": "assistant", "content": text})
        ).reward
        == reward
    )


def test_train_and_eval_share_no_task():
    environment = load_environment()
    train, held_out = ({task.id for task in environment.tasks(split)} for split in ("train", "eval"))
    assert len(train) == 900
    assert len(held_out) == 100
    assert not train & held_out
