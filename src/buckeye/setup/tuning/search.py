"""Which learning rate to try next. Decisions alone: the caller measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

FACTOR = 3.0
"""Between two learning rates that are tried by training."""

STEPS = 12
"""The fewest of a fork, by default."""

_FAR = 30.0
_NEAR = 1.5


def approach(
    change: Callable[[float], float], start: float, target: float, *, tries: int, more: Callable[[], bool]
) -> dict[float, float]:
    """Try learning rates, beginning with `start`, until the policy's change a step is within a factor of 1.5
    of `target`, or there are to be no `more`. Return each with its change, which is NaN where a rate breaks
    the model."""
    found = dict[float, float]()
    rate, below, above = start, 0.0, math.inf
    for _ in range(tries):
        found[rate] = seen = change(rate)
        if target / _NEAR <= seen <= target * _NEAR or not more():
            break
        below, above = (max(below, rate), above) if seen < target else (below, min(above, rate))
        rate = _next(rate, seen, target)
        if not below < rate < above:  # noise, or a change that does not grow with the rate
            rate = math.sqrt(below * above) if below > 0.0 and above < math.inf else rate
    return found


def _next(rate: float, seen: float, target: float) -> float:
    """Where the target should be: while a change is small, it grows as the square of the rate."""
    if not math.isfinite(seen) or seen <= 0.0:
        return rate * _FAR if seen <= 0.0 else rate / _FAR
    return rate * min(max(math.sqrt(target / seen), 1.0 / _FAR), _FAR)


def nearest(found: Mapping[float, float], target: float) -> float:
    """The rate whose change is nearest to the target, by ratio; the smallest where all have broken."""
    known = {rate: change for rate, change in found.items() if math.isfinite(change) and change > 0.0}
    return min(known, key=lambda rate: abs(math.log(known[rate] / target)), default=min(found))


def climb(score: Callable[[float], float | None], start: float) -> dict[float, float]:
    """Try learning rates a FACTOR apart from `start` on, each next to the best one, until that has a worse
    one at each side, or `score` is None (no time is left). Return them with their scores. A score is -inf
    where a rate is too high: then all others are lower."""
    found = dict[int, float]()
    power: int | None = 0
    while power is not None and (known := score(start * FACTOR**power)) is not None:
        found[power] = known
        best = max(found, key=found.__getitem__)
        around = (best + 1, best - 1) if found[best] > -math.inf else (min(found) - 1,)
        power = next((near for near in around if near not in found), None)
    return {start * FACTOR**power: known for power, known in found.items()}
