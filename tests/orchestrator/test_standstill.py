"""Batches that teach nothing are told, with what may be the cause."""

import pytest

from buckeye.config.rewards import GroupAdvantageConfig
from buckeye.orchestrator.standstill import Standstill

from .played import group, rollout

EQUAL = group(rollout(0.5), rollout(0.5, turns=(4,)))
DIFFERENT = group(rollout(0.5), rollout(0.6))


def watch(batches, config=None):
    """What is told after each batch, by step."""
    standstill = Standstill(config or GroupAdvantageConfig())
    told = {step: standstill.look(step, groups) for step, groups in enumerate(batches, start=10)}
    return {step: text for step, text in told.items() if text is not None}


def test_it_is_told_after_five_batches_in_a_row_and_seldom_again():
    assert list(watch([[EQUAL, EQUAL]] * 4 + [[EQUAL, DIFFERENT]] + [[EQUAL]] * 4)) == []
    told = watch([[EQUAL, EQUAL]] * 600)
    assert list(told) == [14, 59, 509]
    assert "the batches of steps 10 to 14" in told[14]
    assert "(mean reward 0.5000)" in told[14]
    assert "of steps 10 to 59" in told[59]


def test_rewards_that_are_advantages_need_no_spread():
    standstill = Standstill(None)
    assert [standstill.look(step, [EQUAL]) for step in range(9)] == [None] * 9


@pytest.mark.parametrize(
    ("groups", "advice"),
    [
        ([group(rollout(0.0), rollout(0.0))], "No task was solved"),
        ([group(rollout(1.0), rollout(1.0))], "Every task was solved"),
        ([group(rollout(0.4)), group(rollout(0.7))], "without siblings"),
        ([group(rollout(0.4, shaping={"length": -0.4}), rollout(0.0))], "No task was solved"),
        ([group(rollout(0.4), rollout(0.4))] * 2 + [EQUAL], "word for word: the policy has collapsed"),
        ([group(rollout(0.4), rollout(0.4)), EQUAL], "Choose tasks that are solved now and then"),
    ],
)
def test_the_advice_fits_the_cause(groups, advice):
    assert advice in watch([groups] * 5)[14]
