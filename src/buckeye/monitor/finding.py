"""Finding: a problem of a run, its evidence, and the advice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from buckeye.base.explanations import explanations, list_items

BLANK = re.compile(r"\b(?:RUN|N|G|R|TASK)\b")
"""Placeholders in the commands of `explanations.md`."""

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


def cause_of(name: str) -> str:
    """Return the cause of a finding as a clause: the first sentence of its explanation."""
    return as_clause(explanations()[name].partition("\n")[0])


def advice_of(name: str, values: Mapping[str, str] | None = None) -> str:
    """Return the advice about a finding as a clause, with `values` in place of the blanks in its commands."""
    return as_clause(fill_blanks(" ".join(list_items(name, "What to do")), values or {}))


def fill_blanks(text: str, values: Mapping[str, str]) -> str:
    """Return a text with values in place of the blanks. Other blanks stay."""
    return BLANK.sub(lambda blank: values.get(blank[0], blank[0]), text)


def as_clause(sentence: str) -> str:
    """Return a sentence as a clause: without its period, and in lower case unless it begins with a name."""
    is_name = sentence[:1] == "`" or sentence[1:2].isupper()
    return (sentence if is_name else sentence[:1].lower() + sentence[1:]).removesuffix(".")
