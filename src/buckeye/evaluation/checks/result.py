"""One line of a report, and how bad it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "note", "warning", "error", "not run"]
"""`error`: rewards are wrong or not reproducible, or what is evaluated is trained on. `warning`: rewards can
be had without what the tasks are about. `note`: what has to be known to read the rewards. `not run` is no
pass: it could not be looked at."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What was checked, how it ended, and one line about it: the worst example where something was found."""

    name: str
    status: Status
    detail: str


def no_time(name: str) -> CheckResult:
    """A check that the budget was too short for."""
    return CheckResult(name, "not run", "no time for it (--budget)")


def shortened(text: str, length: int = 100) -> str:
    """The text on one line, at most `length` characters of it."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def count_of(checks: Sequence[CheckResult], status: Status) -> int:
    """How many ended so."""
    return sum(check.status == status for check in checks)
