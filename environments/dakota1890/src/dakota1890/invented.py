"""Words that are not Dakota but could be: they let a model practise a rule on more than the recorded lemmas.

Syllables follow the train lemmas alone: their onsets at the start and inside a word, their vowels inside and
at the end, each as often as there. An invented word, and every form made of it, differs from every recorded
form even without its diacritics. They are for training only and are marked `invented` in the task.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from dakota1890.corpus import Noun, Verb, load_corpus
from dakota1890.draws import Draws
from dakota1890.morphology import conjugate, possess
from dakota1890.orthography import bare, canonical
from dakota1890.splits import held_out_lemma

GLOSS = "an invented word"
ALL_PERSONS = ("1sg", "2sg", "12", "1pl", "2pl", "3pl")
_WITHOUT_WE = ("1sg", "2sg", "2pl", "3pl")
_OWNERS = ("1sg", "2sg", "3sg", "12", "1pl", "2pl", "3pl")
_SYLLABLE = re.compile(r"([^aeiou]*)([aeiou]ŋ?)")
_ATTEMPTS = 200

W = TypeVar("W", Verb, Noun)


@dataclass(frozen=True, slots=True)
class _Sounds:
    """Each list holds an item as often as the train lemmas do."""

    first_onsets: list[str]
    onsets: list[str]
    vowels: list[str]
    last_vowels: list[str]
    lengths: list[int]


def invented_verb(draws: Draws) -> Verb:
    """A verb of a random class and slot, with a lemma no record holds."""
    return _until_new(
        draws, _draw_verb, lambda verb: [form for p in verb.persons for form in conjugate(verb, p)]
    )


def invented_noun(draws: Draws) -> Noun:
    """A noun of a random kind of possession, with a lemma no record holds."""
    return _until_new(
        draws, _draw_noun, lambda noun: [form for p in noun.persons for form in possess(noun, p)]
    )


def _until_new(draws: Draws, draw: Callable[[Draws], W], forms: Callable[[W], Iterable[str]]) -> W:
    recorded = _recorded_forms()
    for _ in range(_ATTEMPTS):
        word = draw(draws)
        if bare(word.lemma) not in recorded and not any(bare(form) in recorded for form in forms(word)):
            return word
    raise AssertionError(f"no new word in {_ATTEMPTS} draws")


def _draw_verb(draws: Draws) -> Verb:
    return draws.pick(_VERB_KINDS)(draws)


def _prefixed(klass: str, rule: str) -> Callable[[Draws], Verb]:
    def draw(draws: Draws) -> Verb:
        return _verb(klass, _word(draws, starts_with_vowel=False), 0, rule)

    return draw


def _inserted(klass: str, rule: str) -> Callable[[Draws], Verb]:
    def draw(draws: Draws) -> Verb:
        before = _syllable(draws, first=True, last=False)
        if draws.below(4) == 0:
            before += _syllable(draws, first=False, last=False)
        return _verb(klass, before + _rest(draws), len(before), rule)

    return draw


def _class_two(draws: Draws) -> Verb:
    return _verb("II", "y" + draws.pick("ua") + _rest(draws), 0, "VERB-04")


def _class_two_inside(draws: Draws) -> Verb:
    before = _syllable(draws, first=True, last=False)
    lemma = before + "y" + draws.pick(_sounds().vowels) + _rest(draws)
    return _verb("II", lemma, len(before), "VERB-06", persons=_WITHOUT_WE)


def _class_ki(draws: Draws) -> Verb:
    return _verb("ki", "ki" + _rest(draws), 0, "VERB-03")


def _before_vowel(draws: Draws) -> Verb:
    return _verb("I", _word(draws, starts_with_vowel=True), 0, "PHON-06", persons=("12", "1pl", "3pl"))


_VERB_KINDS: list[Callable[[Draws], Verb]] = [
    *[_prefixed("I", "VERB-01")] * 3,
    *[_inserted("I", "VERB-02")] * 4,
    _before_vowel,
    *[_class_two] * 3,
    _class_two_inside,
    *[_prefixed("III", "VERB-07")] * 2,
    _inserted("III", "VERB-08"),
    _class_ki,
]


def _verb(klass: str, lemma: str, at: int, rule: str, persons: tuple[str, ...] = ALL_PERSONS) -> Verb:
    final = "unknown" if lemma.endswith(("a", "aŋ")) else "keeps"
    return Verb(
        lemma=lemma,
        gloss=GLOSS,
        klass=klass,
        at=at,
        dual_at=at,
        persons=persons,
        final=final,
        root=lemma,
        rules=(rule,),
    )


def _draw_noun(draws: Draws) -> Noun:
    kind = draws.below(12)
    if kind < 5:
        return _noun("alienable", _word(draws, starts_with_vowel=False), ("POSS-02",))
    if kind < 7:
        lemma = draws.pick("oi") + _rest(draws)
        return _noun("alienable", lemma, ("POSS-02", "POSS-03"))
    if kind < 8:
        return _noun("alienable, abstract", "wo" + _rest(draws), ("POSS-05",))
    if kind < 10:
        return _noun("inalienable", _syllable(draws, first=True, last=False) + _rest(draws), ("POSS-01",))
    return _noun("kinship", _word(draws, starts_with_vowel=False), ("POSS-06", "POSS-07", "POSS-08"))


def _noun(klass: str, lemma: str, rules: tuple[str, ...]) -> Noun:
    persons = {"inalienable": ("1sg", "2sg", "12", "1pl", "2pl"), "kinship": ("2sg", "3sg")}.get(
        klass, _OWNERS
    )
    return Noun(lemma=lemma, gloss=GLOSS, klass=klass, persons=persons, root=lemma, rules=rules)


def _word(draws: Draws, *, starts_with_vowel: bool) -> str:
    sounds = _sounds()
    onset = "" if starts_with_vowel else draws.pick(sounds.first_onsets)
    vowel = draws.pick("aio") if starts_with_vowel else draws.pick(sounds.vowels)
    return onset + vowel + _rest(draws)


def _rest(draws: Draws) -> str:
    """What follows a first syllable: as many syllables as train lemmas have, the last one ending the word."""
    more = max(0, draws.pick(_sounds().lengths) - 2)
    inner = "".join(_syllable(draws, first=False, last=False) for _ in range(min(more, 2)))
    return inner + _syllable(draws, first=False, last=True)


def _syllable(draws: Draws, *, first: bool, last: bool) -> str:
    sounds = _sounds()
    onset = draws.pick(sounds.first_onsets if first else sounds.onsets)
    return onset + draws.pick(sounds.last_vowels if last else sounds.vowels)


@lru_cache(maxsize=1)
def _sounds() -> _Sounds:
    corpus = load_corpus()
    forms = {canonical(entry.form) for entry in corpus.entries if entry.pos != "affix"}
    forms |= {verb.lemma for verb in corpus.verbs} | {noun.lemma for noun in corpus.nouns}
    train = sorted(form for form in forms if " " not in form and not held_out_lemma(form))
    sounds = _Sounds([], [], [], [], [])
    for form in train:
        syllables = _SYLLABLE.findall(form)
        if len(syllables) < 2 or "".join(onset + vowel for onset, vowel in syllables) != form:
            continue
        sounds.lengths.append(len(syllables))
        sounds.first_onsets.extend(onset for onset, _ in syllables[:1] if onset and onset != "y")
        sounds.onsets.extend(onset for onset, _ in syllables[1:] if onset)
        sounds.vowels.extend(vowel for _, vowel in syllables[:-1])
        sounds.last_vowels.append(syllables[-1][1])
    return sounds


@lru_cache(maxsize=1)
def _recorded_forms() -> frozenset[str]:
    """Every recorded word and every form of a recorded lemma, without diacritics."""
    corpus = load_corpus()
    forms = set(corpus.words)
    forms.update(form for verb in corpus.verbs for person in verb.persons for form in conjugate(verb, person))
    forms.update(form for noun in corpus.nouns for person in noun.persons for form in possess(noun, person))
    return frozenset(map(bare, forms))
