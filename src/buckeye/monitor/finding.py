"""Finding: a problem of a run, its evidence, and the advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Confidence = Literal["sure", "likely", "possible"]
"""Degree of certainty. `sure`: the run has the problem, and a correct run cannot have it. `likely`: chance
does not explain the values, and no other explanation is known. `possible`: the user should check it.
"""
CONFIDENCES: tuple[Confidence, ...] = ("sure", "likely", "possible")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Fact, with the command that shows it."""

    fact: str
    command: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Problem of a run in the steps from `since` to `until`.

    `seen` is the observation as text. `cause` and `advice` are clauses of the sentence that `str` returns.
    `command` is a command that shows details. `figures` are the numbers of the observation, and `evidence`
    has further facts.
    """

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
