"""Words for drawing sentences, by the words that they combine with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from dakota1890.corpus import SentenceWord, load_corpus
from dakota1890.families.sentences.predicates import Predicate, predicates
from dakota1890.splits import is_held_out_lemma

ANIMATE = frozenset({"person", "animal", "fish"})
_ENDS_IN_A = ("a", "aŋ")


class WordBank:
    """Words by role, and predicates by use and mode.

    The uses are `act` (no object), `act somewhere` (no object, or dwelling), `act on` (an object), `act on
    them` (several animate objects), `act on things` (two things) and `be` (an adjective).
    """

    def __init__(self, words: Sequence[SentenceWord]) -> None:
        self._by_role: dict[str, list[SentenceWord]] = defaultdict(list)
        for word in words:
            self._by_role[word.role].append(word)
        self._nouns: dict[frozenset[str], list[SentenceWord]] = {}
        self._adjectives: dict[tuple[frozenset[str], bool], list[SentenceWord]] = {}
        self._predicates: dict[tuple[str, str, bool], list[Predicate]] = defaultdict(list)
        for word in (*self.role("verb"), *self.role("dwelling"), *self.role("adjective")):
            for predicate in predicates(word):
                for use in self._uses(predicate):
                    self._predicates[use, predicate.mode, False].append(predicate)
                    if predicate.person in ("3sg", "3pl"):
                        self._predicates[use, predicate.mode, True].append(predicate)
        self._by_role["postposition"] = [w for w in self.role("postposition") if self.nouns(w.kinds)]

    def role(self, role: str) -> Sequence[SentenceWord]:
        """Return the words of a role."""
        return self._by_role[role]

    def nouns(self, kinds: frozenset[str]) -> Sequence[SentenceWord]:
        """Return the nouns of any of the kinds."""
        if kinds not in self._nouns:
            self._nouns[kinds] = [noun for noun in self._by_role["noun"] if noun.kinds & kinds]
        return self._nouns[kinds]

    def adjectives(self, noun: SentenceWord, *, before_the: bool) -> Sequence[SentenceWord]:
        """Return the adjectives that can directly follow `noun`, and precede kiŋ if `before_the`.

        A final a before kiŋ becomes e, and kiŋ ćiŋ, in some words; the record does not list them.
        """
        key = noun.kinds, before_the
        if key not in self._adjectives:
            self._adjectives[key] = [
                word
                for word in self._by_role["adjective"]
                if word.kinds & noun.kinds and not (before_the and word.word.endswith(_ENDS_IN_A))
            ]
        return self._adjectives[key]

    def predicates(self, use: str, mode: str, *, third: bool = False) -> Sequence[Predicate]:
        """Return the predicates of a use in a mode, in any person or only in the third."""
        return self._predicates[use, mode, third]

    def _uses(self, predicate: Predicate) -> list[str]:
        word = predicate.word
        if word.role == "adjective":
            return ["be"]
        if not self.nouns(word.kinds):
            return []
        if word.role == "dwelling":
            return ["act somewhere"]
        if not word.object_kinds:
            return ["act", "act somewhere"]
        uses = ["act on"] if self.nouns(word.object_kinds) else []
        things = self.nouns(word.object_kinds - ANIMATE)
        return [*uses, "act on things"] if len(things) > 1 else uses


@lru_cache(maxsize=2)
def bank(*, train: bool) -> WordBank:
    """Return all words, or only those that training may use."""
    return WordBank([w for w in load_corpus().sentence_words if not (train and is_held_out_lemma(w.word))])
