"""How attempts ended: from how many there were and how many came to nothing. And the levels of the log lines
that say it."""

from __future__ import annotations

import logging
from typing import Literal

from buckeye.monitor.log import SUCCESS

Verdict = Literal["passed", "partly", "failed", "not tried"]

NEARLY_ALL = 0.9
"""From this share on, what went wrong is no exception but how it went."""


_POWERS_OF_TEN = {10**power for power in range(12)}


def is_told(count: int) -> bool:
    """Return True if a warning is logged at this repetition: at the first one and at each power of ten."""
    return count in _POWERS_OF_TEN


def verdict(tried: int, bad: int = 0) -> Verdict:
    """How `tried` attempts ended, of which `bad` came to nothing: `passed` without a bad one, `failed` if
    nearly all are, `partly` between. Nothing was tried is never passed.

    Raises ValueError unless 0 <= bad <= tried.
    """
    if not 0 <= bad <= tried:
        raise ValueError(f"{bad} bad ones of {tried}")
    if not tried:
        return "not tried"
    if bad >= NEARLY_ALL * tried:
        return "failed"
    return "partly" if bad else "passed"


def rollouts_level(played: int, *, errored: int, truncated: int) -> int:
    """The level of a log line about rollouts: SUCCESS, but ERROR where nearly all of them errored or none was
    played, and WARNING where nearly all that did not error were cut off."""
    if verdict(played, errored) in ("failed", "not tried"):
        return logging.ERROR
    return logging.WARNING if verdict(played - errored, truncated) == "failed" else SUCCESS


def training_level(tried: int, *, left_out: int) -> int:
    """The level of a log line about training on so many samples, or in so many steps: SUCCESS, but WARNING
    where next to nothing was learned from."""
    return SUCCESS if verdict(tried, left_out) in ("passed", "partly") else logging.WARNING
