"""Question of a family: one fact of the record, or several, with every accepted answer.

A question names its subject (`facts`, `cells`, `lemma_ids`, `rule_ids`); `splits` computes its side from
these only. Other forms of question about a fact copy them, so that all of them are on one side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dakota1890.draws import Draws

FORM, WORDS, WORD, NUMBER = "form", "words", "word", "number"
"""Content of the answer tag.

The first three are Dakota; only they can be near misses. A NUMBER is compared as digits.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Question with its accepted answers.

    facts: names of the facts asked about, such as `kaška/1sg`; equal in every direction.
    cells: rule x lemma class, such as `1sg|II`.
    depth: 1 for one affix or word, 2 for two of them, 3 for three, 4 for a sentence.
    ask: the question without its rule; `rule`: the rule in one sentence, or "".
    answer: one of FORM, WORDS, WORD, NUMBER.
    accept: every accepted answer in canonical spelling, the preferred one first.
    prompt_forms: Dakota forms shown in the prompt; as answers they are an echo. `floor_forms`: forms that a
        near miss must improve on.
    number: the largest number asked about, for the numeral range.
    invented: True if a word in it is invented.
    """

    family: str
    facts: tuple[str, ...]
    cells: tuple[str, ...]
    lemma_ids: tuple[str, ...]
    rule_ids: tuple[str, ...]
    depth: int
    ask: str
    rule: str
    answer: str
    accept: tuple[str, ...]
    prompt_forms: tuple[str, ...] = ()
    floor_forms: tuple[str, ...] = ()
    number: int | None = None
    invented: bool = False

    def with_added(
        self,
        *,
        facts: Sequence[str] = (),
        cells: Sequence[str] = (),
        lemma_ids: Sequence[str] = (),
        rule_ids: Sequence[str] = (),
        **changes: Any,
    ) -> Question:
        """Return this question with more facts, cells, lemmas and rules, and with `changes`."""
        return replace(
            self,
            facts=(*self.facts, *facts),
            cells=(*self.cells, *cells),
            lemma_ids=(*self.lemma_ids, *lemma_ids),
            rule_ids=(*self.rule_ids, *rule_ids),
            **changes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Kind of question.

    `recorded` lists every question on the record. If there are too many, `draw` makes a random one instead; a
    family has `recorded` or `draw`, not both. `invent` makes one with an invented word, for training.
    `exceptions` marks a family that is only evaluated.
    """

    name: str
    recorded: Callable[[], Sequence[Question]] | None = None
    draw: Callable[[Draws], Question] | None = None
    invent: Callable[[Draws], Question] | None = None
    exceptions: bool = False


def unique(items: Sequence[str]) -> tuple[str, ...]:
    """Return the items without repeats, in their order."""
    return tuple(dict.fromkeys(items))
