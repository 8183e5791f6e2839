"""Search for a learning rate: decide which rate to try next. The caller measures each rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

FACTOR = 3.0
"""Ratio of two neighboring learning rates that are tried by training."""

MIN_STEPS = 12
"""Default minimum number of steps of a fork."""

_MAX_JUMP = 30.0
_TOLERANCE = 1.5


def search_by_change(
    change: Callable[[float], float], start: float, target: float, *, tries: int, has_time: Callable[[], bool]
) -> dict[float, float]:
    """Try learning rates until the policy's change per step is within a factor of 1.5 of `target`.

    Begins with `start`, and stops earlier when `has_time` returns False. Returns each rate with its change,
    which is NaN if the rate breaks the model.
    """
    changes = dict[float, float]()
    rate, below, above = start, 0.0, math.inf
    for _ in range(tries):
        changes[rate] = measured = change(rate)
        if target / _TOLERANCE <= measured <= target * _TOLERANCE or not has_time():
            break
        below, above = (max(below, rate), above) if measured < target else (below, min(above, rate))
        rate = _next_rate(rate, measured, target)
        if not below < rate < above:  # noise, or the change does not grow with the rate
            rate = math.sqrt(below * above) if below > 0.0 and above < math.inf else rate
    return changes


def _next_rate(rate: float, measured: float, target: float) -> float:
    """Return the rate that should reach the target. A small change grows with the square of the rate."""
    if not math.isfinite(measured) or measured <= 0.0:
        return rate * _MAX_JUMP if measured <= 0.0 else rate / _MAX_JUMP
    return rate * min(max(math.sqrt(target / measured), 1.0 / _MAX_JUMP), _MAX_JUMP)


def nearest_rate(changes: Mapping[float, float], target: float) -> float:
    """Return the rate whose change is closest to the target, or the smallest rate if all break the model."""
    known = {rate: change for rate, change in changes.items() if math.isfinite(change) and change > 0.0}
    return min(known, key=lambda rate: abs(math.log(known[rate] / target)), default=min(changes))


def search_by_score(score: Callable[[float], float | None], start: float) -> dict[float, float]:
    """Try learning rates that differ by FACTOR: first `start`, then neighbors of the best rate.

    Stops when both neighbors of the best rate are worse, or when `score` returns None because no time is
    left. Returns the rates with their scores. If all scores are -inf, the rates are too high, and only lower
    rates are tried.
    """
    scores = dict[int, float]()
    power: int | None = 0
    while power is not None and (new := score(start * FACTOR**power)) is not None:
        scores[power] = new
        best = max(scores, key=scores.__getitem__)
        neighbors = (best + 1, best - 1) if scores[best] > -math.inf else (min(scores) - 1,)
        power = next((neighbor for neighbor in neighbors if neighbor not in scores), None)
    return {start * FACTOR**power: known for power, known in scores.items()}
