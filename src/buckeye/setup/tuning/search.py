"""Search for a learning rate: decides which rate to try next, while the caller measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

FACTOR = 3.0
"""Ratio of two neighboring learning rates that are tried by training."""

MIN_STEPS = 12
"""Default minimum number of steps of a fork."""

_FAR = 30.0
_NEAR = 1.5


def search_by_change(
    change: Callable[[float], float], start: float, target: float, *, tries: int, has_time: Callable[[], bool]
) -> dict[float, float]:
    """Try learning rates until the policy's change per step is within a factor of 1.5 of `target`.

    Begins with `start`, and stops earlier when `has_time` returns False. Returns each rate with its change, which
    is NaN if the rate breaks the model.
    """
    found = dict[float, float]()
    rate, below, above = start, 0.0, math.inf
    for _ in range(tries):
        found[rate] = seen = change(rate)
        if target / _NEAR <= seen <= target * _NEAR or not has_time():
            break
        below, above = (max(below, rate), above) if seen < target else (below, min(above, rate))
        rate = _next(rate, seen, target)
        if not below < rate < above:  # noise, or the change does not grow with the rate
            rate = math.sqrt(below * above) if below > 0.0 and above < math.inf else rate
    return found


def _next(rate: float, seen: float, target: float) -> float:
    """Return the rate expected to hit the target: while a change is small, it grows with the rate squared."""
    if not math.isfinite(seen) or seen <= 0.0:
        return rate * _FAR if seen <= 0.0 else rate / _FAR
    return rate * min(max(math.sqrt(target / seen), 1.0 / _FAR), _FAR)


def nearest_rate(found: Mapping[float, float], target: float) -> float:
    """Return the rate whose change is closest to the target, by ratio; the smallest rate if all broke."""
    known = {rate: change for rate, change in found.items() if math.isfinite(change) and change > 0.0}
    return min(known, key=lambda rate: abs(math.log(known[rate] / target)), default=min(found))


def search_by_score(score: Callable[[float], float | None], start: float) -> dict[float, float]:
    """Try learning rates a FACTOR apart, from `start`, each next to the best so far.

    Stops when the best has a worse neighbor on each side, or when `score` returns None because no time is
    left. Returns the rates with their scores. A score of -inf means that the rate is too high: then only
    lower rates are tried.
    """
    found = dict[int, float]()
    power: int | None = 0
    while power is not None and (known := score(start * FACTOR**power)) is not None:
        found[power] = known
        best = max(found, key=found.__getitem__)
        around = (best + 1, best - 1) if found[best] > -math.inf else (min(found) - 1,)
        power = next((near for near in around if near not in found), None)
    return {start * FACTOR**power: known for power, known in found.items()}
