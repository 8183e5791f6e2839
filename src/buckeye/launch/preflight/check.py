"""One line of a preflight: what was looked at, what was seen, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """`do` says how to put right what is wrong, "" where nothing is. `lines` are the figures behind it."""

    name: str
    state: State
    seen: str
    do: str = ""
    lines: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """What was seen, and what to do, as one line."""
        return f"{self.name}: {self.seen}{f' -> {self.do}' if self.do else ''}"


def ok(name: str, seen: str, lines: Sequence[str] = ()) -> Check:
    """Nothing is wrong."""
    return Check(name=name, state="ok", seen=seen, lines=tuple(lines))


def warning(name: str, seen: str, do: str, lines: Sequence[str] = ()) -> Check:
    """Something that a run may survive."""
    return Check(name=name, state="warning", seen=seen, do=do, lines=tuple(lines))


def failed(name: str, seen: str, do: str, lines: Sequence[str] = ()) -> Check:
    """Something that a run would not survive."""
    return Check(name=name, state="failed", seen=seen, do=do, lines=tuple(lines))


def skipped(name: str, why: str, do: str = "") -> Check:
    """Could not be looked at, or does not matter here."""
    return Check(name=name, state="skipped", seen=why, do=do)
