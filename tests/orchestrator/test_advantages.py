"""Advantages compared with hand-computed numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.config.rewards import (
    CustomAdvantageConfig,
    GroupAdvantageConfig,
    MaxRLAdvantageConfig,
    TurnAdvantageConfig,
)
from buckeye.envs.base import Task
from buckeye.errors import RunError, UsageError
from buckeye.orchestrator.advantages import (
    Scored,
    batch_advantages,
    check_advantage,
    group_advantages,
    group_has_spread,
    max_rl_advantages,
    turn_advantages,
    turn_returns,
)

REWARDS = [1.0, 0.0, 0.0, 1.0]
LENGTHS = [10, 20, 30, 40]


def turns(*rewards, lengths=None, replies=()):
    return Scored(
        reward=sum(rewards),
        turn_rewards=rewards,
        turn_lengths=[1] * len(rewards) if lengths is None else lengths,
        task=Task(id="t", messages=()),
        replies=replies,
    )


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
    got = group_advantages(REWARDS, LENGTHS, GroupAdvantageConfig(**settings))
    assert got == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "lengths", "expected"),
    [
        ([1.0, 0.0], [10, 30], [1.0, -1.0]),  # each against the other
        ([1.0, 0.0, 0.5], [10, 20, 10], [1 - 5 / 30, -15 / 20, 0.5 - 10 / 30]),
        ([1.0, 0.0], [10, 0], [0.0, -1.0]),  # the second has no weight, so the first has no baseline
        ([1.0, 0.0], [0, 0], [1.0, -1.0]),  # without lengths all weights are equal
    ],
)
def test_leave_one_out_uses_the_weighted_mean_of_the_others(rewards, lengths, expected):
    settings = GroupAdvantageConfig(length_weighted_mean=True, leave_one_out=True)
    assert group_advantages(rewards, lengths, settings) == pytest.approx(expected)


@pytest.mark.parametrize("settings", [{}, {"std_norm": "local"}, {"length_weighted_mean": True}])
def test_equal_rewards_have_advantages_of_exactly_zero(settings):
    """In floating point, the sum of six times 0.1 divided by six is not 0.1."""
    rewards, lengths = [0.1] * 6, [1, 2, 3, 4, 5, 6]
    assert group_advantages(rewards, lengths, GroupAdvantageConfig(**settings)) == [0.0] * 6
    assert max_rl_advantages(rewards) == [0.0] * 6


def test_no_advantage_settings_means_raw_rewards():
    assert batch_advantages([[turns(1.0), turns(0.25, 0.5)]], None) == [[[1.0], [0.75, 0.75]]]


def test_a_rollout_without_turns_still_counts_in_the_mean():
    assert batch_advantages([[turns(1.0), turns()]], GroupAdvantageConfig()) == [[[0.5], []]]


def test_the_length_of_a_rollout_is_that_of_all_its_turns():
    group = [turns(0.0, 1.0, lengths=[10, 20]), turns(0.0, lengths=[10])]
    got = batch_advantages([group], GroupAdvantageConfig(length_weighted_mean=True))
    assert got == [[pytest.approx([0.25, 0.25]), pytest.approx([-0.75])]]  # baseline 30 / 40


def test_global_deviation_is_over_all_groups():
    groups = [[turns(1.0), turns(0.0)], [turns(0.5), turns(0.5)]]
    got = batch_advantages(groups, GroupAdvantageConfig(std_norm="global"))
    deviation = (2 * 0.25 / 4) ** 0.5  # rewards 1, 0, .5, .5 around .5
    assert got[0] == [pytest.approx([0.5 / deviation], abs=1e-6), pytest.approx([-0.5 / deviation], abs=1e-6)]
    assert got[1] == [[0.0], [0.0]]


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_group_mean_advantages_sum_to_zero(rewards):
    got = group_advantages(rewards, [1] * len(rewards), GroupAdvantageConfig())
    assert sum(got) == pytest.approx(0.0, abs=1e-9)


def test_max_rl_divides_by_the_mean():
    assert max_rl_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([3.0, -1.0, -1.0, -1.0])  # m = 1/4
    assert max_rl_advantages([0.5, 1.0]) == pytest.approx([-1 / 3, 1 / 3])  # m = 3/4
    assert max_rl_advantages([0.0, 0.0]) == [0.0, 0.0]  # nothing is solved
    assert batch_advantages([[turns(0.0, 1.0), turns(0.0)]], MaxRLAdvantageConfig()) == [[[1.0, 1.0], [-1.0]]]


@pytest.mark.parametrize("rewards", [[-1.0, 1.0], [-1.0, 0.5], [1.0, -0.99]])
def test_max_rl_refuses_rewards_below_zero(rewards, refusal):
    """The last case would have advantages of 199 and -199."""
    with pytest.raises(RunError, match=r"a rollout has -.*advantage\.type"):
        batch_advantages([[turns(r) for r in rewards]], MaxRLAdvantageConfig())
    with refusal(RunError):
        group_has_spread([turns(r) for r in rewards], MaxRLAdvantageConfig())


def test_returns_are_discounted_from_the_end():
    assert turn_returns([1.0, 2.0, 4.0], 0.5) == [1 + 0.5 * 4, 2 + 0.5 * 4, 4]
    assert turn_returns([1.0, 2.0, 4.0], 1.0) == [7, 6, 4]
    assert turn_returns([], 1.0) == []


# Two turns, two turns and one turn; with discount 1/2 the returns are (1.5, 1), (0, 0) and (0.75).
PLAYED = [
    turns(1.0, 1.0, lengths=[10, 30]),
    turns(0.0, 0.0, lengths=[20, 10]),
    turns(0.75, lengths=[20]),
]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [[0.75, 0.5], [-0.75, -0.5], [0.0]]),  # means 0.75 (of three) and 0.5 (of two)
        ({"leave_one_out": True}, [[1.125, 1.0], [-1.125, -1.0], [0.0]]),  # times 3/2 and 2/1
        ({"std_norm": "local"}, [[0.75 / 0.375**0.5, 1.0], [-0.75 / 0.375**0.5, -1.0], [0.0]]),
        # means (1.5 * 10 + 0.75 * 20) / 50 and 1 * 30 / 40
        ({"length_weighted_mean": True}, [[0.9, 0.25], [-0.6, -0.75], [0.15]]),
        ({"neg_clipped": True}, [[0.75, 0.5], [0.0, 0.0], [0.0]]),
    ],
)
def test_turns_are_compared_with_the_same_turn_of_the_others(settings, expected):
    got = turn_advantages(PLAYED, TurnAdvantageConfig(discount=0.5, **settings))
    assert got == [pytest.approx(advantages, abs=1e-6) for advantages in expected]


def test_a_reward_at_the_end_is_the_same_for_all_turns_without_discount():
    group = [turns(0.0, 0.0, 1.0), turns(0.0, 0.0, 0.0)]
    assert turn_advantages(group, TurnAdvantageConfig()) == [[0.5] * 3, [-0.5] * 3]


def test_a_turn_that_one_rollout_alone_reached_has_no_advantage():
    group = [turns(0.0, 0.0, 1.0), turns(0.0, 0.0)]
    assert turn_advantages(group, TurnAdvantageConfig()) == [[0.5, 0.5, 0.0], [-0.5, -0.5]]


def test_turns_divide_by_the_deviation_of_the_batch_s_rewards():
    groups = [[turns(0.0, 1.0), turns(0.0, 0.0)], [turns(1.0), turns(0.0)]]
    got = batch_advantages(groups, TurnAdvantageConfig(std_norm="global"))  # rewards 1, 0, 1, 0
    assert got[0] == [pytest.approx([1.0, 1.0], abs=1e-6), pytest.approx([-1.0, -1.0], abs=1e-6)]


def test_raw_rewards_have_spread_unless_all_are_zero():
    assert group_has_spread([turns(1.0), turns(1.0)], None)
    assert not group_has_spread([turns(0.0), turns(0.0)], None)
    assert group_has_spread([turns(1.0), turns(0.0)], MaxRLAdvantageConfig())
    assert not group_has_spread([turns(1.0), turns(1.0)], MaxRLAdvantageConfig())


def test_spread_of_turns_is_seen_where_rewards_are_equal():
    group = [turns(1.0, 0.0), turns(0.0, 1.0)]
    assert not group_has_spread(group, GroupAdvantageConfig())
    assert group_has_spread(group, TurnAdvantageConfig())
    assert not group_has_spread([turns(1.0, 0.0), turns(1.0, 0.0)], TurnAdvantageConfig())


OWN_ADVANTAGES = """
def best(group, *, scale=1.0):
    top = max(rollout.reward for rollout in group)
    return [scale * (rollout.reward == top) for rollout in group]

def polite(group):
    return [["please" in reply for reply in rollout.replies] for rollout in group]

def too_few(group):
    return [1.0]

def infinite(group):
    return [float("inf")] * len(group)

def raises(group):
    return group["reward"]
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_advantages.py"
    path.write_text(OWN_ADVANTAGES)
    return lambda name, **kwargs: CustomAdvantageConfig(import_path=f"{path}:{name}", kwargs=kwargs)


def test_custom_advantage(own):
    group = [turns(0.0, 1.0), turns(0.5)]
    assert batch_advantages([group], own("best", scale=3.0)) == [[[3.0, 3.0], [0.0]]]
    assert group_has_spread(group, own("best"))
    assert not group_has_spread(group, own("best", scale=0.0))


def test_custom_advantage_gets_replies_and_returns_turn_values(own):
    group = [turns(0.0, 1.0, replies=("please", "now")), turns(0.5, replies=("",))]
    assert batch_advantages([group], own("polite")) == [[[1.0, 0.0], [0.0]]]


@pytest.mark.parametrize("name", ["too_few", "infinite", "raises", "polite"])
def test_custom_advantage_failure_names_the_task(own, name, refusal):
    with refusal(UsageError):
        batch_advantages([[turns(1.0), turns(0.0)]], own(name))


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [("absent", {}, "has no function 'absent'"), ("best", {"size": 1}, "cannot be called with one argument")],
)
def test_missing_custom_advantage_is_refused_before_the_run(own, name, kwargs, message):
    with pytest.raises(UsageError, match=f"orchestrator.advantage.import_path.*{message}"):
        check_advantage(own(name, **kwargs))
