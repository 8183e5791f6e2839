"""Measure how often the 95 % intervals of means over tasks contain the true mean, on simulated rewards.

    python benchmarks/intervals.py [--repeats 4000] [--seed 0]

Prints two tables: distributions of rewards, and distributions of a change between two evaluations of the same
tasks. A cell has the coverage with 1, 4 and 8 rollouts per task.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np

from buckeye.monitor.intervals import Estimate, mean_over_tasks, paired_difference

Draw = Callable[[np.random.Generator, int, int], np.ndarray]
"""Draw rewards [tasks, rollouts] with a generator, for these numbers of tasks and rollouts."""

TASKS = (7, 10, 32, 100)
ROLLOUTS = (1, 4, 8)
_MANY = 400_000


def solved(a: float, b: float) -> Draw:
    """Return a draw of rewards 0 or 1; the solve rate of a task is drawn from Beta(a, b)."""

    def draw(rng: np.random.Generator, tasks: int, rollouts: int) -> np.ndarray:
        return (rng.random((tasks, rollouts)) < rng.beta(a, b, (tasks, 1))).astype(float)

    return draw


def partial(rng: np.random.Generator, tasks: int, rollouts: int) -> np.ndarray:
    """Draw rewards 0, 0.2 or 1."""
    how_often, drawn = rng.beta(1, 1, (tasks, 1)), rng.random((tasks, rollouts))
    return np.where(drawn < 0.6 * how_often, 1.0, np.where(drawn < 0.4 + 0.6 * how_often, 0.2, 0.0))


def graded(rng: np.random.Generator, tasks: int, rollouts: int) -> np.ndarray:
    """Draw rewards from 0 to 1, mostly near 0: skewed, with a mean per task."""
    means = rng.beta(1.0, 5.0, (tasks, 1))
    return rng.beta(6 * means + 1e-3, 6 * (1 - means) + 1e-3, (tasks, rollouts))


def exponential(rng: np.random.Generator, tasks: int, rollouts: int) -> np.ndarray:
    """Draw rewards above 0 without a bound, mean 1: an exponential per task, times a gamma of shape 2."""
    return rng.exponential(1, (tasks, 1)) * rng.gamma(2, 0.5, (tasks, rollouts))


def lognormal(sigma: float) -> Draw:
    """Return a draw of exp of a normal of deviation `sigma`; 64 % of its variance is between tasks."""

    def draw(rng: np.random.Generator, tasks: int, rollouts: int) -> np.ndarray:
        return np.exp(sigma * (0.8 * rng.normal(size=(tasks, 1)) + 0.6 * rng.normal(size=(tasks, rollouts))))

    return draw


def with_cost(rng: np.random.Generator, tasks: int, rollouts: int) -> np.ndarray:
    """Draw rewards 0 or 1, minus an exponential cost of mean 0.3."""
    return solved(1, 1)(rng, tasks, rollouts) - rng.exponential(0.3, (tasks, rollouts))


def signed(rng: np.random.Generator, tasks: int, rollouts: int) -> np.ndarray:
    """Draw rewards -1 or 1."""
    return 2 * solved(2, 2)(rng, tasks, rollouts) - 1


REWARDS: Mapping[str, Draw] = {
    "0 or 1, tasks alike": solved(500, 500),
    "0 or 1, tasks differ": solved(0.3, 0.7),
    "0 or 1, one in ten": solved(1, 9),
    "0, 0.2 or 1": partial,
    "0 to 1, skewed": graded,
    "-1 or 1": signed,
    "0 or 1, less a cost": with_cost,
    "lognormal, sigma 0.5": lognormal(0.5),
    "exponential": exponential,
    "lognormal, sigma 1": lognormal(1.0),
}


def improved(a: float, b: float, *, share: float, by: float) -> Draw:
    """Return a draw of changes of a solve rate that is drawn from Beta(a, b).

    In a `share` of the tasks it rises by the fraction `by` of its distance to 1.
    """

    def draw(rng: np.random.Generator, tasks: int, rollouts: int) -> np.ndarray:
        old = rng.beta(a, b, (tasks, 1))
        new = np.where(rng.random((tasks, 1)) < share, old + by * (1 - old), old)
        before, after = (rng.random((tasks, rollouts)) < p for p in (old, new))
        return after.astype(float) - before

    return draw


CHANGES: Mapping[str, Draw] = {
    "none": improved(0.3, 0.7, share=0, by=0),
    "all tasks a little": improved(1, 1, share=1, by=0.3),
    "a quarter of the tasks much": improved(0.3, 0.7, share=0.25, by=0.9),
    "hard tasks, some": improved(0.2, 1.8, share=1, by=0.5),
}


def of_rewards(rewards: np.ndarray) -> Estimate:
    """Return the estimate from rewards [tasks, rollouts]."""
    return mean_over_tasks(rewards.mean(1).tolist(), range(len(rewards)))


def of_changes(changes: np.ndarray) -> Estimate:
    """Return the estimate from changes [tasks, rollouts] of values 0 or 1."""
    means = changes.mean(1)
    return paired_difference(np.maximum(-means, 0).tolist(), np.maximum(means, 0).tolist(), range(len(means)))


@cache
def mean_of(draw: Draw) -> float:
    """Return the mean of a distribution, with an error far below the width of an interval."""
    return float(draw(np.random.default_rng(0), _MANY, 1).mean())


def coverage(
    draw: Draw,
    estimate: Callable[[np.ndarray], Estimate],
    tasks: int,
    rollouts: int,
    *,
    repeats: int,
    seed: int,
) -> float:
    """Return the share of `repeats` evaluations whose interval contains the mean of the distribution."""
    mean = mean_of(draw)
    rng = np.random.default_rng((seed, tasks, rollouts))
    found = (estimate(draw(rng, tasks, rollouts)) for _ in range(repeats))
    return sum(one.low <= mean <= one.high for one in found) / repeats


def table(
    title: str, laws: Mapping[str, Draw], estimate: Callable[[np.ndarray], Estimate], repeats: int, seed: int
) -> str:
    """Return the coverages as a Markdown table."""
    lines = [
        f"| {title} | {' | '.join(f'{tasks} tasks' for tasks in TASKS)} |",
        "|---|" + "---|" * len(TASKS),
    ]
    for name, draw in laws.items():
        cells = [
            " ".join(
                f"{coverage(draw, estimate, tasks, rollouts, repeats=repeats, seed=seed):.3f}"
                for rollouts in ROLLOUTS
            )
            for tasks in TASKS
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(table("reward", REWARDS, of_rewards, given.repeats, given.seed))
    print()
    print(table("change", CHANGES, of_changes, given.repeats, given.seed))
