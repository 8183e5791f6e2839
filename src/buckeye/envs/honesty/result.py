"""One line of a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "fail", "not run"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What was checked, how it ended, and one line about it: the worst example where it failed."""

    name: str
    status: Status
    detail: str


def passed(name: str, detail: str) -> CheckResult:
    """A check that found nothing."""
    return CheckResult(name, "pass", detail)


def failed(name: str, detail: str) -> CheckResult:
    """A check that found something; `detail` names it."""
    return CheckResult(name, "fail", detail)


def not_run(name: str, why: str) -> CheckResult:
    """A check that could not be made, and why."""
    return CheckResult(name, "not run", why)


def shortened(text: str, length: int = 100) -> str:
    """The text on one line, at most `length` characters of it."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"
