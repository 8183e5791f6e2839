"""Advantages compared with hand-computed numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.config.rewards import (
    ComponentAdvantageConfig,
    CustomAdvantageConfig,
    GroupAdvantageConfig,
    TurnAdvantageConfig,
)
from buckeye.envs.base import Task
from buckeye.errors import UsageError
from buckeye.orchestrator.advantages import (
    Scored,
    batch_advantages,
    check_advantage,
    component_advantages,
    group_advantages,
    group_has_spread,
    turn_advantages,
    turn_returns,
)

REWARDS = [1.0, 0.0, 0.0, 1.0]


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
        ({"std_norm": "local"}, [1.0, -1.0, -1.0, 1.0]),
    ],
)
def test_group_advantages(settings, expected):
    got = group_advantages(REWARDS, GroupAdvantageConfig(**settings))
    assert got == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("settings", [{}, {"std_norm": "local"}, {"leave_one_out": True}])
def test_equal_rewards_have_advantages_of_exactly_zero(settings):
    """In floating point, the sum of six times 0.1 divided by six is not 0.1."""
    assert group_advantages([0.1] * 6, GroupAdvantageConfig(**settings)) == [0.0] * 6


def test_no_advantage_settings_means_raw_rewards():
    assert batch_advantages([[turns(1.0), turns(0.25, 0.5)]], None) == [[[1.0], [0.75, 0.75]]]


def test_a_rollout_without_turns_still_counts_in_the_mean():
    assert batch_advantages([[turns(1.0), turns()]], GroupAdvantageConfig()) == [[[0.5], []]]


def test_global_deviation_is_over_all_groups():
    groups = [[turns(1.0), turns(0.0)], [turns(0.5), turns(0.5)]]
    got = batch_advantages(groups, GroupAdvantageConfig(std_norm="global"))
    deviation = (2 * 0.25 / 4) ** 0.5  # rewards 1, 0, .5, .5 around .5
    assert got[0] == [pytest.approx([0.5 / deviation], abs=1e-6), pytest.approx([-0.5 / deviation], abs=1e-6)]
    assert got[1] == [[0.0], [0.0]]


def scored(**components):
    return replace(turns(sum(components.values())), components=components)


def test_components_are_normalized_one_by_one():
    """`right` has the deviation 1/2 in the first group, `short` has 5; both become -1 and 1.

    The sums are (2, 0, 0, -2) in the first group and (1, -1) in the second one, where short is equal. Their
    deviation over the batch is sqrt((4 + 4 + 1 + 1) / 6).
    """
    first = [
        scored(right=1.0, short=10.0),
        scored(right=1.0, short=0.0),
        scored(right=0.0, short=10.0),
        scored(right=0.0, short=0.0),
    ]
    second = [scored(right=1.0, short=3.0), scored(right=0.0, short=3.0)]
    settings = ComponentAdvantageConfig(weights={"right": 1.0, "short": 1.0})
    got = [[turn[0] for turn in group] for group in batch_advantages([first, second], settings)]
    deviation = (10 / 6) ** 0.5
    assert got[0] == pytest.approx([2 / deviation, 0.0, 0.0, -2 / deviation], abs=1e-6)
    assert got[1] == pytest.approx([1 / deviation, -1 / deviation], abs=1e-6)


def test_components_keep_rewards_apart_that_their_normalized_sum_does_not():
    """The example of the paper: rewards (0, 1) and (0, 2) both become (-1, 1) after a sum."""
    settings = ComponentAdvantageConfig(weights={"a": 1.0, "b": 1.0})
    one = [scored(a=0.0, b=0.0), scored(a=1.0, b=0.0)]
    both = [scored(a=0.0, b=0.0), scored(a=1.0, b=1.0)]
    local = GroupAdvantageConfig(std_norm="local")

    def local_values(group):
        return [turn[0] for turn in batch_advantages([group], local)[0]]

    assert local_values(one) == pytest.approx(local_values(both), abs=1e-6)
    got = batch_advantages([one, both], settings)
    assert got[1][1][0] == pytest.approx(2 * got[0][1][0], abs=1e-6)


def test_components_have_weights_and_may_be_left_out():
    group = [scored(a=1.0, b=0.0, c=5.0), scored(a=0.0, b=1.0, c=0.0)]
    settings = ComponentAdvantageConfig(weights={"a": 3.0, "b": 1.0})
    assert component_advantages(group, settings) == pytest.approx([2.0, -2.0], abs=1e-6)
    assert not group_has_spread(group, ComponentAdvantageConfig(weights={"a": 1.0, "b": 1.0}))
    assert group_has_spread(group, settings)


def test_a_missing_component_is_refused(refusal):
    with refusal(UsageError):
        batch_advantages([[scored(a=1.0), scored(b=1.0)]], ComponentAdvantageConfig(weights={"a": 1.0}))


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_group_mean_advantages_sum_to_zero(rewards):
    got = group_advantages(rewards, GroupAdvantageConfig())
    assert sum(got) == pytest.approx(0.0, abs=1e-9)


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


async def waits(group):
    return [0.0 for _ in group]
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
    [
        ("absent", {}, "has no function 'absent'"),
        ("waits", {}, "is an `async def`"),
        ("best", {"size": 1}, "cannot be called with one argument"),
    ],
)
def test_missing_custom_advantage_is_refused_before_the_run(own, name, kwargs, message):
    with pytest.raises(UsageError, match=f"orchestrator.advantage.import_path.*{message}"):
        check_advantage(own(name, **kwargs))
