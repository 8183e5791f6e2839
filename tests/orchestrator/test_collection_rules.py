"""Rules that select rollouts for the loss: benchmarks/collection.py simulates the real collector."""

import statistics
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from buckeye.orchestrator.rollout import leaves_room

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from collection import GROUPS, LAWS, SIZE, simulate

LAWS_OF_UNITS = [law if law == "two kinds" else pytest.param(law, marks=pytest.mark.slow) for law in LAWS]


def checked(result):
    """Assert the invariants of every simulated run, and return it."""
    assert result.unaccounted == 0
    for batch in result.batches:
        account = batch.account()
        assert account["played"] == account["trained"] + account["dropped"] + account["failed"]
        assert account["trained"] == GROUPS * SIZE
    return result


def ages(result):
    return [
        step - group.oldest_version for step, batch in enumerate(result.batches) for group in batch.groups
    ]


@pytest.mark.parametrize("law", LAWS_OF_UNITS)
@pytest.mark.parametrize(("level", "scarce"), [(0, False), (1, True), (2, False), (4, True)])
def test_without_oversampling_no_rollout_is_lost(law, level, scarce):
    result = checked(simulate("buckeye", law, level=level, scarce=scarce, batches=12))
    bias, noise = result.bias
    assert not any(batch.dropped for batch in result.batches)
    assert abs(bias) <= noise
    assert max(ages(result)) <= (8 if level else 0)


@pytest.mark.parametrize("law", LAWS_OF_UNITS)
@pytest.mark.parametrize("age", [1, 3])
def test_low_max_token_age_waits_and_loses_nothing(law, age):
    result = checked(simulate("buckeye", law, level=1, age=age, batches=12))
    assert max(ages(result)) <= age
    assert not any(batch.dropped for batch in result.batches)


def test_excess_oversampling_uses_the_first_to_finish():
    result = checked(simulate("buckeye", "log-normal", level=0, oversampling=1.5, batches=12))
    dropped = [group for batch in result.batches for _, group in batch.dropped_groups]
    assert {reason for batch in result.batches for reason in batch.dropped} == {"stale"}
    assert any(group.rollouts[0].cut for group in dropped)  # a rollout that is too old for use is ended early
    bias, noise = result.bias
    assert bias < -noise
    assert statistics.fmean(g.rollouts[0].seconds for g in dropped) > 0


def test_oversampling_within_token_age_loses_nothing():
    result = checked(simulate("buckeye", "log-normal", level=1, oversampling=1.5, batches=12))
    assert not any(batch.dropped for batch in result.batches)


GROUP = st.tuples(st.integers(3, 7), st.just(1))


def possible(size, waiting, *, open_places, batch, batch_size):
    """Return True if all waiting groups still fit in time after one of `size` takes its places.

    Tries the groups by earliest deadline, each in the first batch with room.
    """
    room = {batch: open_places - size}
    for due, other in sorted(waiting):
        for number in range(batch, due + 1):
            room.setdefault(number, batch_size)
            if room[number] >= other:
                room[number] -= other
                break
        else:
            return False
    return True


@given(
    due=st.integers(3, 7),
    waiting=st.lists(GROUP, max_size=12),
    open_places=st.integers(1, 4),
    batch_size=st.integers(1, 4),
)
@example(due=4, waiting=[(3, 1)], open_places=1, batch_size=1)
def test_leaves_room_matches_brute_force_schedule(due, waiting, open_places, batch_size):
    options = {"open_places": open_places, "batch": 3, "batch_size": batch_size}
    sooner = [one for one in waiting if one[0] < due]
    counts = Counter(other for other, _ in waiting)
    assert leaves_room(1, due, counts, **options) == possible(1, sooner, **options)
