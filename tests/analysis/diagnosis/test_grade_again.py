"""The test of `--try` that sends recorded replies to new environments."""

import pytest
from tests.analysis.diagnosis.made_runs import Made, make

from buckeye import runs
from buckeye.analysis.diagnosis.facts import DiagnosisFacts
from buckeye.analysis.diagnosis.grade_again import grade_again

ENVIRONMENT = """
import random

from buckeye.envs.base import Outcome, Task


class Words:
    name = "made"

    def __init__(self):
        self.seen = {{}}

    def tasks(self, split):
        return [
            Task(id=f"{{split}}-{{number}}", messages=({{"role": "user", "content": "say"}},))
            for number in range({tasks})
        ]

    async def rollout(self, task, policy):
        text = (await policy.chat(task.messages)).text
        return Outcome(reward=float({reward}))


def load_environment():
    return Words()
"""
RIGHT = "text[0] in 'ab'"


def found(folder, reward, tasks=12, line=lambda line: line):
    env = folder / "words.py"
    env.write_text(ENVIRONMENT.format(reward=reward, tasks=tasks))
    made = Made(settings={"orchestrator": {"env": [{"id": str(env), "args": {}}]}}, line=line)
    return [one.name for one in grade_again(DiagnosisFacts(runs.open(make(folder / "run", made))))]


@pytest.mark.parametrize(
    ("reward", "names"),
    [
        (RIGHT, []),
        ("0.5 * (text[0] in 'ab')", ["graded_otherwise"]),
        ("self.seen.setdefault(text[1], text[0] in 'ab')", ["graded_otherwise"]),
        ("random.random()", ["grader_random"]),
    ],
    ids=["as recorded", "half", "cached by a part of the reply", "random"],
)
def test_recorded_replies_are_graded_again(tmp_path, reward, names):
    assert found(tmp_path, reward) == names


def test_turns_get_their_recorded_replies(tmp_path):
    two_turns = "text[0] in 'ab' and (await policy.chat(task.messages)).text == 'end'"

    def with_second_turn(line):
        more = [{"role": "user", "content": "more"}, {"role": "assistant", "content": "end"}]
        return {**line, "turns": 2, "messages": [*line["messages"], *more]}

    assert found(tmp_path, two_turns, line=with_second_turn) == []


def test_the_other_environments_are_compared_if_one_has_no_rollouts_to_repeat(tmp_path):
    known, other = tmp_path / "words.py", tmp_path / "other.py"
    known.write_text(ENVIRONMENT.format(reward="0.5", tasks=12))
    other.write_text(ENVIRONMENT.format(reward="0.5", tasks=12).replace('"made"', '"other"'))
    envs = [{"id": str(path), "args": {}} for path in (other, known)]
    run = runs.open(make(tmp_path / "run", Made(settings={"orchestrator": {"env": envs}})))
    findings = grade_again(DiagnosisFacts(run))
    assert next(findings).name == "graded_otherwise"
    with pytest.raises(LookupError):
        next(findings)


def test_an_environment_without_the_recorded_tasks_is_not_compared(tmp_path):
    with pytest.raises(LookupError):
        found(tmp_path, RIGHT, tasks=1)
