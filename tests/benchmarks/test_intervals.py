"""Coverage of the intervals of evaluations, under the distributions of benchmarks/intervals.py."""

import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import intervals

from buckeye.monitor.intervals import mean_over_tasks

pytestmark = pytest.mark.e2e
REPEATS = 250
HARDEST = ("exponential", "lognormal, sigma 1")


def covered(draw, estimate, tasks):
    """Return the mean coverage for 1, 4 and 8 rollouts per task (750 evaluations, standard error 0.008)."""
    return statistics.fmean(
        intervals.coverage(draw, estimate, tasks, rollouts, repeats=REPEATS, seed=1)
        for rollouts in intervals.ROLLOUTS
    )


@pytest.mark.parametrize("law", intervals.REWARDS)
def test_nineteen_of_twenty_intervals_hold_the_mean_reward(law):
    draw = intervals.REWARDS[law]
    found = {tasks: covered(draw, intervals.of_rewards, tasks) for tasks in (7, 10, 32, 100)}
    assert found[7] >= 0.90
    assert found[10] >= (0.91 if law in HARDEST else 0.93)
    assert min(found[32], found[100]) >= 0.93
    assert found[100] <= 0.98


@pytest.mark.parametrize("law", intervals.CHANGES)
def test_nineteen_of_twenty_intervals_hold_the_change(law):
    found = {
        tasks: covered(intervals.CHANGES[law], intervals.of_changes, tasks) for tasks in (7, 10, 32, 100)
    }
    assert min(found.values()) >= 0.93
    assert found[100] <= 0.97


def test_tasks_about_the_same_word_are_no_more_certain_than_one():
    """Clusters of one to six are solved together.

    Treated as independent, 66 % of the intervals hold the mean.
    """
    rng, held = np.random.default_rng(0), []
    for _ in range(1000):
        sizes = rng.integers(1, 7, 24)
        solved = np.repeat(rng.random(24) < 0.3, sizes).astype(float)
        got = mean_over_tasks(solved.tolist(), np.repeat(np.arange(24), sizes).tolist())
        held.append(got.low <= 0.3 <= got.high)
    assert statistics.fmean(held) >= 0.93
