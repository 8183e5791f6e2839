"""Advantages against numbers computed by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.config.orchestrator import AdvantageConfig
from buckeye.orchestrator.advantages import batch_advantages, group_advantages, has_spread

REWARDS = [1.0, 0.0, 0.0, 1.0]
LENGTHS = [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, -0.5, -0.5, 0.5]),
        ({"leave_one_out": True}, [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ({"length_weighted_mean": True}, [0.5, -0.5, -0.5, 0.5]),  # (10 + 40) / 100
        ({"std_norm": "local"}, [1.0, -1.0, -1.0, 1.0]),
        ({"neg_clipped": True}, [0.5, 0.0, 0.0, 0.5]),
    ],
)
def test_group_advantages(settings, expected):
    got = group_advantages(REWARDS, LENGTHS, AdvantageConfig(**settings))
    assert got == pytest.approx(expected, abs=1e-6)


def test_length_weighted_baseline_differs_from_the_mean():
    got = group_advantages([1.0, 0.0], [30, 10], AdvantageConfig(length_weighted_mean=True))
    assert got == pytest.approx([0.25, -0.75])


def test_no_advantage_settings_means_raw_rewards():
    assert group_advantages(REWARDS, LENGTHS, None) == REWARDS


def test_global_deviation_is_over_all_groups():
    groups = [([1.0, 0.0], [5, 5]), ([0.5, 0.5], [5, 5])]
    got = batch_advantages(groups, AdvantageConfig(std_norm="global"))
    deviation = (2 * 0.25 / 4) ** 0.5  # rewards 1, 0, .5, .5 around .5
    assert got[0] == pytest.approx([0.5 / deviation, -0.5 / deviation], abs=1e-6)
    assert got[1] == [0.0, 0.0]


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_group_mean_advantages_sum_to_zero(rewards):
    got = group_advantages(rewards, [1] * len(rewards), AdvantageConfig())
    assert sum(got) == pytest.approx(0.0, abs=1e-9)


def test_spread():
    assert has_spread([0.0, 0.2])
    assert not has_spread([0.3, 0.3, 0.3])
