"""Statistical intervals for the rules: a value is significant if its interval excludes the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from buckeye.monitor.intervals import wilson_interval

Array = npt.NDArray[np.float64]

SURE = 4.0
"""Standard errors of a significant difference. The number is high because many rules test many runs."""


def share_interval(hits: float, count: float, errors: float = SURE) -> tuple[float, float]:
    """Return Wilson's interval of a share, from `hits` of `count`; (0, 1) if `count` is 0."""
    return wilson_interval(hits, count, errors)


def mean_interval(values: Sequence[float] | Array, errors: float = SURE) -> tuple[float, float]:
    """Return the interval of a mean; unbounded with fewer than two values."""
    found = np.asarray(values, float)
    if len(found) < 2:
        return -math.inf, math.inf
    half = errors * float(found.std(ddof=1)) / math.sqrt(len(found))
    return float(found.mean()) - half, float(found.mean()) + half


def is_below(these: Sequence[float] | Array, others: Sequence[float] | Array, errors: float = SURE) -> bool:
    """Return True if the mean of `these` is significantly below the mean of `others`."""
    a, b = np.asarray(these, float), np.asarray(others, float)
    if min(len(a), len(b)) < 2:
        return False
    error = math.hypot(float(a.std(ddof=1)) / math.sqrt(len(a)), float(b.std(ddof=1)) / math.sqrt(len(b)))
    return float(b.mean() - a.mean()) > max(errors * error, 1e-9)


def slope_interval(x: Array, y: Array, errors: float = SURE) -> tuple[float, float]:
    """Return the interval of the slope in y = slope * x."""
    total = float(x @ x)
    if len(x) < 3 or total <= 0.0:
        return -math.inf, math.inf
    slope = float(x @ y) / total
    residual = y - slope * x
    half = errors * math.sqrt(float((residual * residual * x * x).sum())) / total  # heteroscedastic (White)
    return slope - half, slope + half


def centered(values: Array, groups: npt.NDArray[Any]) -> Array:
    """Return values minus the mean of their group."""
    _, places = np.unique(groups, return_inverse=True)
    return values - (np.bincount(places, values) / np.bincount(places))[places]


def rms(values: Array) -> float:
    """Return the root mean square; NaN without values."""
    return math.sqrt(float(np.mean(np.square(values)))) if len(values) else math.nan


def explained_by_window(windows: Array, features: Array, *, shuffles: int = 200) -> tuple[float, bool]:
    """Return the adjusted R^2 of `features` f64[N, D] on their windows, and whether it is significant.

    It is significant if no shuffled order of the rows explains as much.
    """
    _, places = np.unique(windows, return_inverse=True)
    counts = np.bincount(places)
    centered = features - features.mean(0)
    total = float(np.square(centered).sum())
    if total <= 0.0 or len(places) <= len(counts):
        return 0.0, False

    def between(order: npt.NDArray[np.int64]) -> float:
        sums = np.zeros((len(counts), centered.shape[1]))
        np.add.at(sums, places, centered[order])
        return float((np.square(sums).sum(1) / counts).sum()) / total

    rows, rng = np.arange(len(places)), np.random.default_rng(0)
    share = between(rows)
    adjusted = 1.0 - (1.0 - share) * (len(places) - 1) / (len(places) - len(counts))
    return adjusted, all(between(rng.permutation(rows)) < share for _ in range(shuffles))


def cross_validated_fit(features: Array, values: Array, folds: Array) -> float:
    """Return the correlation of values f64[N] with their ridge prediction from other folds.

    0 if the values or predictions are constant.
    """
    predicted = np.zeros(len(values))
    for fold in np.unique(folds):
        rest = folds != fold
        known = features[rest]
        ridge = known.T @ known + 0.1 * max(1.0, float(np.square(known).mean()) * len(known)) * np.eye(
            known.shape[1]
        )
        predicted[~rest] = features[~rest] @ np.linalg.solve(ridge, known.T @ values[rest])
    if min(float(predicted.std()), float(values.std())) < 1e-9:
        return 0.0
    return float(np.corrcoef(predicted, values)[0, 1])
