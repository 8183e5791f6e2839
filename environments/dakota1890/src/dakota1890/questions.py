"""What a family asks: one fact of the record, or several, with every answer that is accepted.

A question names what it is about (`facts`, `cells`, `lemma_ids`, `rule_ids`); `splits` computes its side from
these alone. Another way to ask about the same fact copies them, so that all ways of asking stay on one side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dakota1890.draws import Draws

FORM, WORDS, WORD, NUMBER = "form", "words", "word", "number"
"""What the answer tag holds. The first three are Dakota; only they can be nearly right. A NUMBER is compared
as digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One question.

    facts: names of the facts asked about, such as `kaška/1sg`; the same in every direction.
    cells: rule x lemma class, such as `1sg|II`.
    depth: 1 one affix or word, 2 two of them, 3 three, 4 a sentence.
    ask: the question without its rule; `rule`: the rule in one sentence, "" if there is none.
    answer: one of FORM, WORDS, WORD, NUMBER.
    accept: every accepted answer in canonical spelling, the preferred one first.
    prompt_forms: Dakota forms shown in the prompt, which as answers are an echo. `floor_forms`: what a near
        miss must be closer than.
    number: the largest number asked about, for the numeral range.
    invented: whether a word in it is invented.
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

    def extended(
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
    """A kind of question.

    `recorded` lists every question on the record. Where there are too many, `draw` makes one at random.
    `invent` makes one with an invented word, for training. A family has `recorded` or `draw`, not both.
    `exceptions` marks a family that is only ever evaluated.
    """

    name: str
    recorded: Callable[[], Sequence[Question]] | None = None
    draw: Callable[[Draws], Question] | None = None
    invent: Callable[[Draws], Question] | None = None
    exceptions: bool = False


def unique(items: Sequence[str]) -> tuple[str, ...]:
    """Return the items without repeats, in their order."""
    return tuple(dict.fromkeys(items))
