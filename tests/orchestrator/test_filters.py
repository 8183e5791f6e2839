"""Which groups are not trained on."""

import pytest

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.orchestrator.filters import group_filter

from .played import group, rollout


def cause(rewards, *, shaping=0.0, **settings):
    rollouts = [rollout(r, shaping={"length": -shaping * i}) for i, r in enumerate(rewards)]
    return group_filter(OrchestratorConfig(**settings))(group(*rollouts))


def test_nothing_is_dropped_unless_asked():
    assert [cause(r) for r in ([0.0, 0.0], [1.0, 1.0], [0.5, 0.5])] == [None, None, None]


def test_zero_spread():
    assert cause([0.5, 0.5], zero_spread="drop") == "no_spread"
    assert cause([0.5, 0.6], zero_spread="drop") is None


def test_equal_rewards_that_are_advantages_are_kept():
    assert cause([1.0, 1.0], zero_spread="drop", advantage=None) is None
    assert cause([0.0, 0.0], zero_spread="drop", advantage=None) == "no_spread"


def test_spread_is_that_of_the_shaped_rewards():
    assert cause([0.5, 0.5], shaping=0.1, zero_spread="drop") is None
    assert cause([0.5, 0.6], shaping=0.1, zero_spread="drop") == "no_spread"


def test_spread_by_turn():
    rollouts = [
        rollout(1.0, turns=(1, 1), turn_rewards=[1.0, 0.0]),
        rollout(1.0, turns=(1, 1), turn_rewards=[0.0, 1.0]),
    ]
    by_turn = OrchestratorConfig(zero_spread="drop", advantage={"type": "turn"})
    assert group_filter(by_turn)(group(*rollouts)) is None
    assert group_filter(OrchestratorConfig(zero_spread="drop"))(group(*rollouts)) == "no_spread"


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([0.0, 0.0], "too_hard"), ([1.0, 1.0], "too_easy"), ([0.0, 1.0], None), ([0.5, 0.5], None)],
)
def test_solved_and_unsolved_groups(rewards, expected):
    assert cause(rewards, buffer={"online_difficulty_filtering": True}) == expected


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 0.375], "too_hard"),  # 0.1875
        ([0.0, 0.5], None),  # a mean of exactly min_reward stays
        ([1.0, 0.5], None),
        ([1.0, 0.75], "too_easy"),  # 0.875
    ],
)
def test_difficulty_has_borders(rewards, expected):
    buffer = {"type": "online-difficulty", "min_reward": 0.25, "max_reward": 0.75}
    assert cause(rewards, buffer=buffer) == expected


def test_difficulty_is_about_the_raw_reward():
    buffer = {"type": "online-difficulty", "min_reward": 0.25, "max_reward": 0.75}
    assert cause([0.25, 0.25], shaping=0.5, buffer=buffer) is None


def test_errored_rollouts_are_not_counted():
    settings = OrchestratorConfig(buffer={"online_difficulty_filtering": True})
    assert group_filter(settings)(group(rollout(1.0), rollout(None), rollout(1.0))) == "too_easy"
