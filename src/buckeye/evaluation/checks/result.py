"""`CheckResult`: status and details of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CheckStatus = Literal["pass", "note", "warning", "error", "not run"]
"""Status of a check.

* `error`: rewards are wrong or not reproducible, or held-out tasks are trained on.
* `warning`: rewards can be gained without solving the task.
* `note`: a fact needed to interpret the rewards.
* `not run`: the check could not run; it does not count as passed.
"""

NO_ANSWERS = (
    "no task has `accept` or `answer` in its data, as a text, a number, or a list; of a dataset: no reward "
    "names the column of answers"
)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Name, status, and one line of detail, which shows the worst example if the check found a problem.

    `code` names the problem in `buckeye explain`, if it has an explanation.
    """

    name: str
    status: CheckStatus
    detail: str
    code: str | None = None

    @property
    def line(self) -> str:
        """Detail, and the command that explains the code."""
        return self.detail if self.code is None else f"{self.detail}; more: buckeye explain {self.code}"


def out_of_time_result(name: str) -> CheckResult:
    """Return the result of a check that did not run within the budget."""
    return CheckResult(name, "not run", "out of time (raise --budget)")


def shortened(text: str, length: int = 100) -> str:
    """Return the text on one line, cut to `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"
