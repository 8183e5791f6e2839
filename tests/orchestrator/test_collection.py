"""Metrics of how a batch was collected: accounts of rollouts, and the length bias of dropped groups."""

import logging
import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.orchestrator.collected_groups import CollectedGroups
from buckeye.orchestrator.sampling_bias import CollectionWatch
from buckeye.orchestrator.step_logs import log_untrained_rollouts

from .made_rollouts import group, rollout


def played(reward, seconds, tokens=3):
    return rollout(reward, turns=(tokens,), seconds=seconds, sampling_seconds=seconds)


def collected(*groups):
    """Return a batch of these (drop reason or None, group) pairs."""
    batch = CollectedGroups(groups=[])
    for reason, one in groups:
        batch.add(one, reason)
    return batch


def test_account_counts_every_attempt_once():
    failed = played(None, 4.0)
    again = replace(played(1.0, 2.0), earlier_attempts=(failed, failed))
    batch = collected(
        (None, group(again, played(0.0, 1.0))),
        ("stale", group(played(1.0, 9.0), replace(played(1.0, 9.0), cut=True))),
        ("no_spread", group(played(0.0, 1.0), played(0.0, 1.0))),
        ("errored", group(played(None, 3.0), played(1.0, 3.0))),
    )
    assert batch.account() == {
        "played": 10,
        "trained": 2,
        "dropped": 5,
        "failed": 3,
        "retried": 2,
        "cut": 1,
    }
    assert batch.sampled_rewards == [1.0, 0.0, 0.0, 0.0, 1.0]  # the stale task is retried
    assert batch.environment_metrics()["env/letters/reward/played"] == pytest.approx(0.4)
    assert batch.environment_metrics()["env/letters/errored"] == 3


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "stale", "errored", "no_spread"]),
            st.lists(st.tuples(st.sampled_from([None, 0.0, 1.0]), st.integers(0, 2)), min_size=1, max_size=4),
        ),
        max_size=8,
    )
)
def test_account_of_attempts_adds_up(groups):
    failed = played(None, 1.0)
    batch = collected(
        *[
            (
                reason,
                group(
                    *[replace(played(reward, 1.0), earlier_attempts=(failed,) * n) for reward, n in members]
                ),
            )
            for reason, members in groups
        ]
    )
    account = batch.account()
    assert account["played"] == sum(1 + n for _, members in groups for _, n in members)
    assert account["played"] == account["trained"] + account["dropped"] + account["failed"]


def test_collection_metrics_match_hand_computed_values():
    batch = collected(
        (None, group(played(1.0, 1.0, 10), played(1.0, 3.0, 30))),
        ("stale", group(played(1.0, 6.0, 40))),
        ("no_spread", group(played(1.0, 2.0, 20))),
    )
    values = CollectionWatch().record(batch)
    assert values["collection/trained/seconds/mean"] == 2.0
    assert values["collection/dropped/seconds/mean"] == 4.0
    assert values["collection/finished/seconds/mean"] == pytest.approx(10 / 3)
    assert values["collection/finished/completion_len/mean"] == pytest.approx(80 / 3)
    assert values["collection/sampling_seconds"] == 12.0
    assert values["collection/lost_share"] == pytest.approx(8 / 12)
    assert not any(name.startswith("collection/bias") for name in values)  # one lost group is too few


def test_difference_matches_welch():
    kept, lost = [1.0, 2.0, 3.0, 2.5], [4.0, 6.0, 5.0]
    batch = collected(
        *[(None, group(played(1.0, seconds))) for seconds in kept],
        *[("stale", group(played(1.0, seconds))) for seconds in lost],
    )
    values = CollectionWatch().record(batch)
    error = math.sqrt(statistics.variance(kept) / 4 + statistics.variance(lost) / 3)
    apart = statistics.fmean(kept) - statistics.fmean(lost)
    assert values["collection/bias/seconds/errors"] == pytest.approx(apart / error)
    everything = statistics.fmean(kept + lost)
    assert values["collection/bias/seconds"] == pytest.approx(statistics.fmean(kept) / everything - 1)
    assert values["collection/bias/completion_len"] == 0.0
    assert values["collection/bias/completion_len/errors"] == 0.0


def test_refused_prompt_does_not_count_as_length():
    refused = rollout(None, turns=(), seconds=0.0)
    usable = [(None, group(played(1.0, seconds))) for seconds in (9.0, 10.0, 11.0)]
    lost = [("errored", group(refused, refused)) for _ in range(3)]
    values = CollectionWatch().record(collected(*usable, *lost))
    assert values["collection/finished/seconds/mean"] == 10.0
    assert not [name for name in values if name.startswith(("collection/bias", "collection/failures/"))]


@pytest.mark.parametrize(
    ("rollouts", "level"),
    [
        ([played(1.0, 1.0), played(0.0, 1.0)], None),
        ([replace(played(1.0, 1.0), truncated=True)] * 2, logging.WARNING),
        ([played(None, 1.0)] * 2, logging.ERROR),
    ],
)
def test_step_without_training_signal_is_logged(caplog, wording, rollouts, level):
    caplog.set_level(logging.INFO)
    log_untrained_rollouts(3, collected((None, group(*rollouts))), 0)
    assert [record.levelno for record in caplog.records][:1] == [level] * (level is not None)
    assert caplog.messages == wording


@pytest.mark.parametrize(
    ("poor_steps", "level"),
    [(1, logging.WARNING), (2, logging.INFO), (10, logging.WARNING)],
)
def test_steps_without_training_signal_warn_at_powers_of_ten(caplog, poor_steps, level):
    caplog.set_level(logging.INFO)
    cut_off = group(replace(played(1.0, 1.0), truncated=True), replace(played(1.0, 1.0), truncated=True))
    log_untrained_rollouts(3, collected((None, cut_off)), 0, poor_steps=poor_steps)
    assert [record.levelno for record in caplog.records] == [level]


def test_filtered_groups_are_not_collection_bias():
    watch = CollectionWatch()
    for _ in range(5):
        values = watch.record(
            collected((None, group(played(1.0, 1.0))), ("too_easy", group(played(1.0, 9.0))))
        )
    assert "collection/bias/seconds" not in values


def sampled(rng, lost_when_long):
    """Return a batch of 16 groups, some of them lost at random or because they are long."""
    groups = []
    for _ in range(16):
        seconds = rng.lognormvariate(0.0, 0.7)
        lost = rng.random() < (0.3 if not lost_when_long else 0.05 if seconds < 1.0 else 0.5)
        groups.append(("stale" if lost else None, group(played(1.0, seconds))))
    return collected(*groups)


@pytest.mark.parametrize("lost_when_long", [False, True])
def test_bias_is_detected_and_chance_is_not(lost_when_long):
    most = []
    for seed in range(5):
        rng, watch = random.Random(seed), CollectionWatch()
        seen = [
            watch.record(sampled(rng, lost_when_long)).get("collection/bias/seconds/errors", 0.0)
            for _ in range(100)
        ]
        most.append(min(seen[20:]))
    assert (max(most) < -4.0) if lost_when_long else (min(most) > -4.0)


def test_failures_are_compared_with_length_and_reward():
    batch = collected(
        *[(None, group(played(1.0, s), played(1.0, s))) for s in (1.0, 1.2, 0.8)],
        *[(None, group(played(0.2, s), played(None, 9.0 + s))) for s in (1.0, 1.1, 0.9)],
    )
    values = CollectionWatch().record(batch)
    assert values["collection/failures/seconds"] < -0.5
    assert values["collection/failures/seconds/errors"] < -4
    assert values["collection/failures/reward"] == pytest.approx(1.0 / 0.6 - 1)
