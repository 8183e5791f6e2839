"""Warnings about a run that cannot learn, while it runs."""

import json
import logging

import pytest
from tests.orchestrator.made_rollouts import group, rollout

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.monitor.run_watch import RunWatch
from buckeye.orchestrator.batch import batch_metrics

EQUAL = group(rollout(0.5), rollout(0.5, turns=(4,)))
CUT_BACK = rollout(0.4, shaping={"length": -0.4})
DIFFERENT = group(rollout(0.5), rollout(0.6))


@pytest.fixture
def told(tmp_path, caplog):
    """Return a function that records batches; it returns the warnings by step."""

    def play(batches, **settings):
        config = OrchestratorConfig(**settings)
        watch, said = RunWatch(tmp_path), {}
        for step, groups in enumerate(batches, start=10):
            record = {"process": "orchestrator", "step": step, **batch_metrics(step, groups, config)}
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                watch.check()
            said[step] = caplog.messages
        return {step: texts for step, texts in said.items() if texts}

    return play


def test_it_is_told_after_three_batches_in_a_row_and_seldom_again(told):
    said = told([[EQUAL, EQUAL]] * 2 + [[EQUAL, DIFFERENT]] + [[EQUAL]] * 2 + [[DIFFERENT]] + [[EQUAL]] * 60)
    assert list(said) == [18, 65]
    assert "batches of steps 16 to 18" in said[18][0]
    assert "(mean 0.5000)" in said[18][0]
    assert "of steps 16 to 65" in said[65][0]


def test_what_comes_back_is_told_again(told):
    assert list(told([[EQUAL]] * 3 + [[DIFFERENT]] + [[EQUAL]] * 3)) == [12, 16]


def test_rewards_that_are_advantages_need_no_spread(told):
    assert told([[EQUAL]] * 9, advantage=None) == {}


def test_a_teacher_needs_no_differing_rewards(told):
    assert told([[EQUAL]] * 9, teacher={"model": "big", "base_url": "http://localhost:1"}) == {}


@pytest.mark.parametrize(
    ("groups", "advice"),
    [
        ([group(rollout(0.0), rollout(0.0, turns=(4,)))], "no task is solved"),
        ([group(rollout(1.0), rollout(1.0))], "every task is solved"),
        ([group(rollout(0.4)), group(rollout(0.7))], "each group has one rollout"),
        ([group(CUT_BACK, rollout(0.0, turns=(4,), shaping={"length": 0.0}))], "no task is solved"),
        ([group(rollout(0.4), rollout(0.4))] * 2 + [EQUAL], "identical: the policy has collapsed"),
        ([group(rollout(0.4), rollout(0.4)), EQUAL], "use tasks that the model sometimes solves"),
        ([EQUAL], "every reply gets the same reward above 0"),
        ([group(rollout(0.0, truncated=True), rollout(0.0, turns=(4,), truncated=True))], "is cut off"),
    ],
)
def test_the_cause_is_named(told, groups, advice):
    assert advice in told([groups] * 3)[12][0]
