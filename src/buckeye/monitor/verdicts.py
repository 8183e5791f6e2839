"""Verdicts on attempts by the share of failures, and the levels of log lines about them."""

from __future__ import annotations

import logging
from typing import Literal

from buckeye.monitor.log import SUCCESS

Verdict = Literal["passed", "partly", "failed", "not tried"]

NEARLY_ALL = 0.9
"""Minimum share of failures for the verdict `failed`."""


_POWERS_OF_TEN = {10**power for power in range(12)}


def is_power_of_ten(count: int) -> bool:
    """Return True for 1, 10, 100, ... At these counts, a repeated warning is logged."""
    return count in _POWERS_OF_TEN


def verdict(tried: int, bad: int = 0) -> Verdict:
    """Return the verdict on `tried` attempts with `bad` failures.

    The verdict is `not tried` without attempts, `passed` without failures, `failed` if nearly all attempts
    failed, else `partly`.

    Raise `ValueError` unless 0 <= bad <= tried.
    """
    if not 0 <= bad <= tried:
        raise ValueError(f"{bad} failures of {tried} attempts")
    if not tried:
        return "not tried"
    if bad >= NEARLY_ALL * tried:
        return "failed"
    return "partly" if bad else "passed"


def rollouts_log_level(rollouts: int, *, errored: int, truncated: int) -> int:
    """Return the log level of a line about rollouts.

    The level is ERROR without rollouts or if nearly all failed, WARNING if nearly all others were truncated,
    else SUCCESS.
    """
    if verdict(rollouts, errored) in ("failed", "not tried"):
        return logging.ERROR
    return logging.WARNING if verdict(rollouts - errored, truncated) == "failed" else SUCCESS


def training_log_level(tried: int, *, left_out: int) -> int:
    """Return the log level of a line about training on `tried` samples or steps.

    The level is WARNING if nearly all were left out, else SUCCESS.
    """
    return SUCCESS if verdict(tried, left_out) in ("passed", "partly") else logging.WARNING
