"""Filters of groups that are not trained on."""

import pytest

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.orchestrator.filters import drop_cause

from .made_rollouts import group, rollout


def cause(rewards, *, shaping=0.0, **settings):
    rollouts = [rollout(r, shaping={"length": -shaping * i}) for i, r in enumerate(rewards)]
    return drop_cause(group(*rollouts), OrchestratorConfig(**settings))


DROP = {"zero_spread": "drop"}
DIFFICULTY = {"buffer": {"online_difficulty_filtering": True}}
BORDERS = {"buffer": {"type": "online-difficulty", "min_reward": 0.25, "max_reward": 0.75}}


@pytest.mark.parametrize(
    ("rewards", "settings", "expected"),
    [
        ([0.0, 0.0], {}, None),
        ([1.0, 1.0], {}, None),
        ([0.5, 0.5], {}, None),
        ([0.5, 0.5], DROP, "no_spread"),
        ([0.5, 0.6], DROP, None),
        ([1.0, 1.0], {**DROP, "advantage": None}, None),  # equal rewards as advantages
        ([0.0, 0.0], {**DROP, "advantage": None}, "no_spread"),
        ([0.5, 0.5], {**DROP, "shaping": 0.1}, None),
        ([0.5, 0.6], {**DROP, "shaping": 0.1}, "no_spread"),
        ([0.0, 0.0], DIFFICULTY, "too_hard"),
        ([1.0, 1.0], DIFFICULTY, "too_easy"),
        ([0.0, 1.0], DIFFICULTY, None),
        ([0.5, 0.5], DIFFICULTY, None),
        ([0.0, 0.375], BORDERS, "too_hard"),  # 0.1875
        ([0.0, 0.5], BORDERS, None),  # a mean of exactly min_reward is kept
        ([1.0, 0.5], BORDERS, None),
        ([1.0, 0.75], BORDERS, "too_easy"),  # 0.875
        ([0.25, 0.25], {**BORDERS, "shaping": 0.5}, None),  # difficulty uses the raw reward
    ],
)
def test_groups_that_are_dropped(rewards, settings, expected):
    assert cause(rewards, **settings) == expected


def test_spread_by_turn():
    rollouts = [
        rollout(1.0, turns=(1, 1), turn_rewards=[1.0, 0.0]),
        rollout(1.0, turns=(1, 1), turn_rewards=[0.0, 1.0]),
    ]
    by_turn = OrchestratorConfig(zero_spread="drop", advantage={"type": "turn"})
    assert drop_cause(group(*rollouts), by_turn) is None
    assert drop_cause(group(*rollouts), OrchestratorConfig(zero_spread="drop")) == "no_spread"


def test_errored_rollouts_are_not_counted():
    settings = OrchestratorConfig(buffer={"online_difficulty_filtering": True})
    assert drop_cause(group(rollout(1.0), rollout(None), rollout(1.0)), settings) == "too_easy"
