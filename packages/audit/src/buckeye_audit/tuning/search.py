"""Which learning rate to try next. Decisions alone: what they are about is measured by others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

FACTOR = 3.0
"""Between two learning rates that are tried by training."""

STEPS = 12
"""The fewest of a fork, where nobody says."""

_FAR = 30.0
_NEAR = 1.5
_SLOPES = (0.5, 4.0)
_QUADRATIC = 2.0  # a KL divergence grows as the square of what it is caused by, while that is small
_LONGEST_WARMUP = 10
_STEEP = 1.5


def approach(
    change: Callable[[float], float], start: float, target: float, *, tries: int, more: Callable[[], bool]
) -> dict[float, float]:
    """Learning rates that were tried, beginning with `start`, each with the policy's change a step, until one
    is within a factor of 1.5 of `target`, or there are to be no `more`. `change` is NaN where a rate breaks
    the model."""
    found = dict[float, float]()
    rate, below, above = start, 0.0, math.inf
    for _ in range(tries):
        found[rate] = seen = change(rate)
        if target / _NEAR <= seen <= target * _NEAR or not more():
            break
        below, above = (max(below, rate), above) if seen < target else (below, min(above, rate))
        rate = _next(found, rate, target)
        if not below < rate < above:  # noise, or a change that does not grow with the rate
            rate = math.sqrt(below * above) if below > 0.0 and above < math.inf else rate
    return found


def _next(found: Mapping[float, float], rate: float, target: float) -> float:
    """Where the target should be, by the slope between the two nearest tries, on logarithmic scales."""
    seen = found[rate]
    if not math.isfinite(seen) or seen <= 0.0:
        return rate * _FAR if seen <= 0.0 else rate / _FAR
    known = [(r, c) for r, c in found.items() if r != rate and math.isfinite(c) and c > 0.0]
    slope = _QUADRATIC
    if known:
        other, change = min(known, key=lambda one: abs(math.log(one[1] / target)))
        slope = math.log(seen / change) / math.log(rate / other) if change != seen else _QUADRATIC
    slope = min(max(slope, _SLOPES[0]), _SLOPES[1])
    step = math.log(target / seen) / slope
    return rate * math.exp(min(max(step, -math.log(_FAR)), math.log(_FAR)))


def nearest(found: Mapping[float, float], target: float) -> float:
    """The rate whose change is nearest to the target, by ratio; the smallest where all have broken."""
    known = {rate: change for rate, change in found.items() if math.isfinite(change) and change > 0.0}
    if not known:
        return min(found)
    return min(known, key=lambda rate: abs(math.log(known[rate] / target)))


def climb(score: Callable[[float], float | None], start: float) -> dict[float, float]:
    """Learning rates with their scores, from `start` upwards by FACTOR while it gets better, else downwards:
    until the best has a worse one at each side, or `score` is None (no time is left). A score is -inf where a
    rate is too high: then all others are lower."""
    found = dict[float, float]()

    def better(rate: float) -> bool:
        known = score(rate)
        if known is None:
            return False
        before = max(found.values(), default=-math.inf)
        found[rate] = known
        return known > before

    factors = (FACTOR, 1.0 / FACTOR) if better(start) else (1.0 / FACTOR,)
    for factor in factors if found else ():
        rate = start * factor
        while better(rate):
            rate *= factor
        if max(found, key=lambda one: found[one]) != start:
            break
    return found


def top_of(scores: Mapping[float, float], least: float) -> float:
    """Where the parabola through the highest score and its two neighbours has its top, on a logarithmic
    scale; the rate with the highest score where one of them is not there, or has less than `least`: it is
    beyond a cliff."""
    rates = sorted(scores)
    at = max(range(len(rates)), key=lambda place: scores[rates[place]])
    around = [scores[rate] for rate in rates[max(0, at - 1) : at + 2]]
    if len(around) < 3 or min(around) < least:
        return rates[at]
    low, mid, high = around
    bend = low - 2.0 * mid + high
    return rates[at] * FACTOR ** ((low - high) / (2.0 * bend) if bend else 0.0)


def warmup_of(changes: Sequence[float]) -> int:
    """Over how many steps the rate is to rise so that the first step changes the policy no more than later
    ones: a change grows as the square of the rate."""
    later = [change for change in changes[1:] if change > 0.0]
    if not later or not math.isfinite(changes[0]):
        return 0
    ratio = math.sqrt(changes[0] / (sum(later) / len(later)))
    return min(_LONGEST_WARMUP, round(ratio)) if ratio > _STEEP else 0
