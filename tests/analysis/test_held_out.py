"""The demonstration's table of held-out tasks, from hand-written evaluations."""

import asyncio
import json

import pytest

from buckeye.envs.base import Outcome, Task
from buckeye.setup.demo.baseline import measure_baseline
from buckeye.setup.demo.held_out import compare_held_out, exact_table, read_held_out_tasks

FAMILIES = ("free", "fixed")


class Words:
    """Environment of words to reply. In the family `fixed` the answer is constant and needs no knowledge."""

    name = "words"
    splits = ("train", "near", "far")

    def tasks(self, split):
        if split == "train":
            return [self._task(family, "train", i) for family in FAMILIES for i in range(100, 160)]
        return [self._task(f, s, i) for f in FAMILIES for s in ("near", "far") for i in range(20)]

    def _task(self, family, split, i):
        answer = "fix" if family == "fixed" else f"word{i * 7919 % 1000}"
        prompt = {"role": "user", "content": f"{split} {family}: say number {i}"}
        data = {
            "family": family,
            "split": split,
            "lemma_ids": [f"{family}{split}{i // 2}"],
            "accept": [answer],
        }
        return Task(id=f"{family}-{split}-{i}", messages=(prompt,), data=data)

    async def rollout(self, task, policy):
        reply = await policy.chat(task.messages)
        return Outcome(reward=float(reply.text == task.data["accept"][0]))


def record(family, split, number, reward, **more):
    data = {"family": family, "split": split, "lemma_ids": [f"{family}{split}{number // 2}"]}
    return {"task_id": f"{family}-{split}-{number}", "data": data, "reward": reward, **more}


@pytest.fixture
def evaluated(tmp_path):
    """Return a function that reads the tasks of an evaluation with these records."""

    def read(*records):
        path = tmp_path / "words.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
        return read_held_out_tasks(path)

    return read


def everything(solved):
    """Return records of all held-out tasks, solved where `solved(family, split, number)` is true."""
    return [
        record(f, s, i, float(solved(f, s, i))) for f in FAMILIES for s in ("near", "far") for i in range(20)
    ]


@pytest.fixture
def before(evaluated):
    return evaluated(*everything(lambda f, s, i: f == "fixed"))


@pytest.fixture
def after(evaluated):
    return evaluated(*everything(lambda f, s, i: f == "fixed" or s == "near"))


def test_change_of_the_tasks_scored_both_times(before, after):
    whole = compare_held_out(before, after, 0.5)
    assert (whole.after.n, whole.after.clusters) == (80, 40)
    assert (whole.before.value, whole.after.value, whole.change.value) == (0.5, 0.75, 0.25)
    assert whole.change.low > 0


def test_table_shows_intervals_and_change(before, after, wording):
    assert exact_table(compare_held_out(before, after, 0.125)) == wording


def test_baseline_is_the_best_policy_without_content(after):
    found = asyncio.run(measure_baseline(Words(), "eval", after))
    assert found == pytest.approx(0.5, abs=0.05)


def test_rollouts_of_a_task_are_one_value(evaluated):
    rollouts = {0: [1.0, 0.0, 0.0, 0.0], 1: [1.0, 1.0, 0.3, 0.3], 2: [None, None, 0.0, 1.0]}
    tasks = evaluated(*(record("free", "near", n, r) for n, rewards in rollouts.items() for r in rewards))
    only = compare_held_out({}, tasks, 0.0)
    assert only.after.value == pytest.approx((1 / 4 + 2 / 4 + 1 / 2) / 3)
    assert (only.before, only.change) == (None, None)


def test_task_without_any_score_is_not_a_failure(evaluated):
    before = evaluated(*(record("free", "near", i, 0.0) for i in range(4)))
    after = evaluated(record("free", "near", 0, None), *(record("free", "near", i, 1.0) for i in range(1, 4)))
    only = compare_held_out(before, after, 0.0)
    assert (only.after.value, only.after.n, only.change.n) == (1.0, 3, 3)


def test_nothing_scored_at_all(evaluated):
    only = compare_held_out({}, evaluated(record("free", "near", 0, None)), 0.0)
    assert only.after is None
    assert exact_table(only).splitlines()[1].split() == ["all", "tasks", "0", "0", "-", "-", "-", "0.0"]
