"""Accounts of the rollouts of a batch, and the log lines about them."""

import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.orchestrator.collected_groups import CollectedGroups
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
    assert batch.by_environment.metrics(batch.groups)["env/letters/reward/played"] == pytest.approx(0.4)
    assert batch.by_environment.metrics(batch.groups)["env/letters/errored"] == 3


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
