"""Result of one preflight check: finding and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from buckeye.errors import BuckeyeError

State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Result of one check.

    `do` is the remedy, "" if none is needed. `lines` are the details. `code` is the code of a failed check.
    """

    name: str
    state: State
    seen: str
    do: str = ""
    lines: tuple[str, ...] = ()
    code: str = "BK-PREFLIGHT"

    @property
    def line(self) -> str:
        """Finding and remedy as one line."""
        return f"{self.name}: {self.seen}{f' -> {self.do}' if self.do else ''}"


def ok(name: str, seen: str, lines: Sequence[str] = ()) -> Check:
    """Return a result without problems."""
    return Check(name=name, state="ok", seen=seen, lines=tuple(lines))


def warning(name: str, seen: str, do: str, lines: Sequence[str] = ()) -> Check:
    """Return a warning: a run may still succeed."""
    return Check(name=name, state="warning", seen=seen, do=do, lines=tuple(lines))


def failed(name: str, seen: str, do: str, lines: Sequence[str] = (), *, code: str = "BK-PREFLIGHT") -> Check:
    """Return a failure: a run would fail."""
    return Check(name=name, state="failed", seen=seen, do=do, lines=tuple(lines), code=code)


def failed_with(name: str, error: BuckeyeError, do: str = "") -> Check:
    """Return the result of a check that raised an error. The remedy is the error's hint, by default `do`."""
    seen = f"{error.at}: {error.message}" if error.at else error.message
    return failed(name, seen, error.hint or do, code=error.code)


def skipped(name: str, reason: str, do: str = "") -> Check:
    """Return a result for a check that was not possible, or not necessary."""
    return Check(name=name, state="skipped", seen=reason, do=do)
