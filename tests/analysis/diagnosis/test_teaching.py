"""Effect of a step: comparison of rollouts' values with the change of their log-probs."""

from itertools import permutations

import numpy as np
import pytest

from buckeye.analysis.diagnosis.half_group_training import (
    KeptBatch,
    agreement,
    common_token,
    component_weights,
)
from buckeye.transport.batches import Batch, Sample


def sample(tokens, advantage=0.0, context=1):
    ids = np.array([9] * context + list(tokens), np.int32)
    mask = np.arange(len(ids)) >= context
    return Sample(
        token_ids=ids,
        loss_mask=mask,
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        temperature=1.0,
    )


def played(group, *, rewards=None, components=None, samples=None, rollout=None):
    samples = samples or [sample([1, 2], at) for at in range(len(group))]
    return KeptBatch(
        batch=Batch(step=0, samples=tuple(samples), orchestrator_state={}),
        rollout=np.array(range(len(samples)) if rollout is None else rollout),
        group=np.array(group),
        rewards=np.zeros(len(group)) if rewards is None else np.array(rewards, float),
        components={name: np.array(values, float) for name, values in (components or {}).items()},
    )


def beside(values, other):
    """Return each value for a held-out rollout, each after a trained rollout with the value `other`."""
    return np.array([each for value in values for each in (other, value)], float)


def test_the_agreement_is_the_mean_correlation_of_what_is_held_out():
    rewards = beside([1, 2, 3, 0, 1, 5, 5], 9)  # all of the last group have equal rewards
    batch = played([0] * 6 + [1] * 4 + [2] * 4, rewards=rewards)
    moved = beside([2, 4, 6, 1, 0, 3, 4], -70)
    found = agreement([batch], [moved], lambda one: one.rewards)
    assert (found.mean, found.groups) == (pytest.approx(0.0), 2)
    assert found.error == pytest.approx((1 / 2 + 1 / 1) ** 0.5 / 2)


def test_its_error_is_the_spread_over_all_shuffles():
    moved, rewards = beside([0.3, -1.0, 0.2, 4.0], 7), [0.0, 1.0, 1.0, 3.0]
    each = [
        agreement([batch], [moved], lambda one: one.rewards)
        for order in permutations(rewards)
        for batch in [played([0] * 8, rewards=beside(order, 5))]
    ]
    assert np.mean([one.mean for one in each]) == pytest.approx(0.0)
    assert np.std([one.mean for one in each]) == pytest.approx(each[0].error)


def test_what_is_no_number_is_left_out():
    batch = played([0] * 4 + [1] * 4, rewards=[0, 1, 0, 2] * 2)
    found = agreement([batch], [np.array([0, 1, 0, np.nan, 0, 1, 0, 3])], lambda one: one.rewards)
    assert (found.mean, found.groups) == (pytest.approx(1.0), 1)


def test_where_no_rewards_differ_nothing_is_said():
    batch = played([0] * 4, rewards=[0, 1, 5, 1])
    assert agreement([batch], [np.arange(4.0)], lambda one: one.rewards).error == np.inf


def test_the_weights_of_the_parts_are_found():
    components = {"form": [0, 1, 1, 0, 1], "right": [0, 0, 1, 1, 0.5], "length": [3, 9, 4, 7, 1]}
    rewards = [
        2 * right - 0.5 * form + 0.1
        for right, form in zip(components["right"], components["form"], strict=True)
    ]
    found = component_weights([played([0] * 5, rewards=rewards, components=components)])
    assert found == {name: pytest.approx(w) for name, w in {"form": -0.5, "length": 0, "right": 2}.items()}


def test_what_differs_between_tasks_alone_has_no_part_in_the_weights():
    right, level = np.array([0, 1, 0, 1, 1, 0]), np.array([0, 0, 5, 5, 9, 9])
    batch = played([0, 0, 1, 1, 2, 2], rewards=2 * right + level, components={"right": right})
    assert component_weights([batch]) == {"right": pytest.approx(2)}


def test_a_reward_that_is_no_sum_of_its_parts_has_no_weights():
    components = {"form": [0, 1, 1, 0, 1, 0], "right": [0, 0, 1, 1, 1, 1]}
    rewards = [form != right for form, right in zip(components["form"], components["right"], strict=True)]
    assert component_weights([played([0] * 6, rewards=rewards, components=components)]) == {}
    assert component_weights([played([0, 0], rewards=[0, 1])]) == {}


def test_half_of_each_group_is_taught_advantages_as_large_as_the_real_ones():
    samples = [sample([1], advantage) for advantage in (1, 1, -1, -1, 3, 3, -3)]
    batch = played([0] * 4 + [1] * 3, samples=samples, rewards=[1, 8, 3, 8, 0, 8, 4])
    taught = [float(one.advantages[1]) for one in batch.with_advantages_from(batch.rewards).samples]
    size = ((4 * 1 + 3 * 9) / (2 * 1 + 2 * 4)) ** 0.5  # of -1, 1, -2, 2
    assert taught == pytest.approx([-size, 0, size, 0, -2 * size, 0, 2 * size])
    assert not any(one.advantages.any() for one in batch.with_advantages_from(np.ones(7)).samples)


def test_a_component_is_taken_from_the_rewards_with_its_weight():
    batch = played([0, 0], rewards=[1, 3], components={"form": [0, 2]})
    assert batch.without("form", 0.5).tolist() == [1, 2]
    assert batch.without("other", 0.5).tolist() == [1, 3]


def test_a_rollout_of_several_samples_is_one():
    samples = [sample([1, 2], 1.0), sample([2], 1.0), sample([3, 4, 5], -1.0)]
    batch = played([0, 0], samples=samples, rollout=[0, 0, 1])
    assert batch.advantages == pytest.approx([1.0, -1.0])
    assert batch.sums([1.0, 2.0, 4.0]) == pytest.approx([3.0, 4.0])
    assert batch.sampled_mask(2).tolist() == [1.0, 0.0]
    batch = played([0, 0, 0], samples=[*samples, sample([1], 1.0)], rollout=[0, 0, 1, 2])
    taught = batch.with_advantages_from(np.array([0.0, 5.0, 2.0])).samples
    assert [np.sign(one.advantages).tolist() for one in taught] == [
        [0, -1, -1],
        [0, -1],
        [0, 0, 0, 0],
        [0, 1],
    ]


def test_the_common_token_is_in_about_half_of_the_rollouts():
    tokens = [[1, 5], [1, 2], [1, 2], [1, 3]]
    assert common_token([played([0] * 4, samples=[sample(each) for each in tokens])]) == 2
    assert common_token([played([0] * 4, samples=[sample([1])] * 4)]) is None
    by_task = [[7], [7], [7, 3], [7], [8], [8, 3], [8], [8]]  # 7 and 8 are in all of a group
    assert common_token([played([0] * 4 + [1] * 4, samples=[sample(each) for each in by_task])]) == 3
