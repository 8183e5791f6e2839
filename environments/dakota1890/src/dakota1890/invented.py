"""Words that are not Dakota but could be: a model can practice a rule on more than the recorded lemmas.

Syllables follow only the train lemmas: their onsets at the start and inside a word, their vowels inside and
at the end, with the same frequencies. An invented word, and every form made of it, differs from every
recorded form even without its diacritics. They are for training only and are marked `invented` in the task.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from dakota1890.corpus import Noun, Verb, load_corpus
from dakota1890.draws import Draws
from dakota1890.morphology.kinship import relative_of, relative_of_any_person, verb_of_having
from dakota1890.morphology.nouns import possess
from dakota1890.morphology.objects import (
    DERIVED_VERBS,
    object_pairs,
    reflexive,
    reflexive_persons,
    with_object,
)
from dakota1890.morphology.verbs import conjugate
from dakota1890.orthography import canonical, strip_diacritics
from dakota1890.splits import is_held_out_lemma

GLOSS = "an invented word"
ALL_PERSONS = ("1sg", "2sg", "12", "1pl", "2pl", "3pl")
_BODY_OWNERS = ("1sg", "2sg", "12", "1pl", "2pl")
_OWNERS = ("1sg", "2sg", "3sg", "12", "1pl", "2pl", "3pl")
_SYLLABLE = re.compile(r"([^aeiou]*)([aeiou]ŋ?)")
_ATTEMPTS = 200

W = TypeVar("W", Verb, Noun)


@dataclass(frozen=True, slots=True)
class _Sounds:
    """Sounds in lists that repeat each item as often as the train lemmas do."""

    first_onsets: list[str]
    onsets: list[str]
    vowels: list[str]
    last_vowels: list[str]
    lengths: list[int]


def invented_verb(draws: Draws) -> Verb:
    """Return a verb of a random class and slot, with an unrecorded lemma."""
    return _until_new(draws, _draw_verb, _verb_forms)


def invented_noun(draws: Draws) -> Noun:
    """Return a noun of a random kind of possession, with an unrecorded lemma."""
    return _until_new(draws, _draw_noun, _noun_forms)


def is_new(forms: Iterable[str]) -> bool:
    """Return True if none of `forms` is a recorded form, also without diacritics."""
    return _recorded_forms().isdisjoint(map(strip_diacritics, forms))


def _until_new(draws: Draws, draw: Callable[[Draws], W], forms: Callable[[W], Iterable[str]]) -> W:
    for _ in range(_ATTEMPTS):
        word = draw(draws)
        if is_new(forms(word)):
            return word
    raise AssertionError(f"no new word in {_ATTEMPTS} draws")


def _verb_forms(verb: Verb) -> list[str]:
    return [verb.lemma, *(form for person in verb.persons for form in conjugate(verb, person))]


def _noun_forms(noun: Noun) -> list[str]:
    return [noun.lemma, *(form for person in noun.persons for form in possess(noun, person))]


def _draw_noun(draws: Draws) -> Noun:
    kind = draws.below(10)
    if kind < 5:
        return _noun("alienable", _word(draws, starts_with_vowel=False), ("POSS-02",))
    if kind < 7:
        lemma = draws.pick("oi") + _rest(draws)
        return _noun("alienable", lemma, ("POSS-02", "POSS-03"))
    if kind < 8:
        return _noun("alienable, abstract", "wo" + _rest(draws), ("POSS-05",))
    return _noun("inalienable", _syllable(draws, first=True, last=False) + _rest(draws), ("POSS-01",))


def _noun(klass: str, lemma: str, rules: tuple[str, ...]) -> Noun:
    persons = _BODY_OWNERS if klass == "inalienable" else _OWNERS
    return Noun(lemma=lemma, gloss=GLOSS, klass=klass, persons=persons, root=lemma, rules=rules)


def _word(draws: Draws, *, starts_with_vowel: bool) -> str:
    sounds = _sounds()
    onset = "" if starts_with_vowel else draws.pick(sounds.first_onsets)
    vowel = draws.pick("aio") if starts_with_vowel else draws.pick(sounds.vowels)
    return onset + vowel + _rest(draws)


def _rest(draws: Draws) -> str:
    """Return the rest of a word after its first syllable, with the number of syllables of a train lemma."""
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
    train = sorted(form for form in forms if " " not in form and not is_held_out_lemma(form))
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


_VERB_STEMS: Mapping[str, Callable[[Draws], str]] = {
    "consonant": lambda draws: _word(draws, starts_with_vowel=False),
    "vowel": lambda draws: _word(draws, starts_with_vowel=True),
    "inside": lambda draws: _rest(draws),
    "y": lambda draws: "y" + draws.pick("ua") + _rest(draws),
    "y inside": lambda draws: "y" + draws.pick(_sounds().vowels) + _rest(draws),
    "ki": lambda draws: "ki" + _rest(draws),
}
"""Part of the lemma from the person marker on, for each shape of verb."""

_VERB_KINDS = (
    *[("I", "consonant", "VERB-01", ALL_PERSONS)] * 3,
    *[("I", "inside", "VERB-02", ALL_PERSONS)] * 4,
    ("I", "vowel", "PHON-06", ("12", "1pl", "3pl")),
    *[("II", "y", "VERB-04", ALL_PERSONS)] * 3,
    ("II", "y inside", "VERB-06", ("1sg", "2sg", "2pl", "3pl")),
    *[("III", "consonant", "VERB-07", ALL_PERSONS)] * 2,
    ("III", "inside", "VERB-08", ALL_PERSONS),
    ("ki", "ki", "VERB-03", ALL_PERSONS),
)


def _draw_verb(draws: Draws) -> Verb:
    klass, shape, rule, persons = draws.pick(_VERB_KINDS)
    before = _syllable(draws, first=True, last=False) if shape.endswith("inside") else ""
    if shape == "inside" and draws.below(4) == 0:
        before += _syllable(draws, first=False, last=False)
    lemma = before + _VERB_STEMS[shape](draws)
    return Verb(
        lemma=lemma,
        gloss=GLOSS,
        klass=klass,
        at=len(before),
        dual_at=len(before),
        persons=persons,
        final="unknown" if lemma.endswith(("a", "aŋ")) else "keeps",
        root=lemma,
        rules=(rule,),
    )


@lru_cache(maxsize=1)
def _recorded_forms() -> frozenset[str]:
    """Return every recorded word and every form of a recorded lemma, without diacritics."""
    corpus = load_corpus()
    forms = set(corpus.words)
    for verb in corpus.verbs:
        forms.update(_verb_forms(verb))
        forms.update(_made_forms(verb))
    forms.update(form for noun in corpus.nouns for form in _noun_forms(noun))
    forms.update(form for noun in corpus.derived for form in noun.forms)
    for kin in corpus.kin:
        forms.update(_verb_forms(verb_of_having(kin)))
        forms.update(
            form for owner in ("2sg", "3sg") if owner in kin.forms for form in relative_of(kin, owner)
        )
        forms.update(relative_of_any_person(kin) if "3sg" in kin.forms else ())
    return frozenset(map(strip_diacritics, forms))


def _made_forms(verb: Verb) -> Iterator[str]:
    """Yield the forms with an object, the reflexive forms, and the forms of verbs derived from `verb`."""
    for kind in verb.derives:
        if kind == "object":
            yield from (with_object(verb, *pair) for pair in object_pairs(verb))
        elif kind == "reflexive":
            yield from (reflexive(verb, person) for person in reflexive_persons(verb))
        else:
            for made in DERIVED_VERBS[kind](verb):
                yield from _verb_forms(made)
