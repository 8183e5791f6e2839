"""What is wrong with a run, why it is thought so, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Confidence = Literal["sure", "likely", "possible"]
"""`sure`: it was seen and is never so in a run that is right. `likely`: beyond what chance makes, and nothing
else is known to look so. `possible`: worth a look, and no accusation."""
CONFIDENCES: tuple[Confidence, ...] = ("sure", "likely", "possible")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """A fact, and the command that shows it."""

    fact: str
    command: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something is wrong with a run: `seen` in the steps from `since` to `until`. `cause` and `advice` are
    clauses, `command` shows more; `figures` are the numbers behind it. `evidence` are more facts."""

    name: str
    since: int
    until: int
    seen: str
    figures: Mapping[str, float]
    cause: str
    advice: str
    command: str
    confidence: Confidence = "likely"
    evidence: tuple[Evidence, ...] = ()

    def __str__(self) -> str:
        return f"{self.seen}: {self.cause}; {self.advice}. See: {self.command}"
