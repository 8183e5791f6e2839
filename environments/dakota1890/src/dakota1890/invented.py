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

from dakota1890.corpus import Derived, Kin, Noun, Verb, load_corpus
from dakota1890.draws import Draws
from dakota1890.morphology import conjugate, possess
from dakota1890.morphology.derivation import derive, verbal_noun
from dakota1890.morphology.kinship import have_as, relative_of, somebodys
from dakota1890.orthography import bare, canonical
from dakota1890.splits import held_out_lemma

GLOSS = "an invented word"
ALL_PERSONS = ("1sg", "2sg", "12", "1pl", "2pl", "3pl")
_WITHOUT_WE = ("1sg", "2sg", "2pl", "3pl")
_BODY_OWNERS = ("1sg", "2sg", "12", "1pl", "2pl")
_OWNERS = ("1sg", "2sg", "3sg", "12", "1pl", "2pl", "3pl")
_SYLLABLE = re.compile(r"([^aeiou]*)([aeiou]ŋ?)")
_ATTEMPTS = 200

W = TypeVar("W", Verb, Noun, Kin, Derived)


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


def invented_kin(draws: Draws) -> Kin:
    """A kin term no record holds."""
    return _until_new(draws, _draw_kin, _kin_forms)


def invented_base(draws: Draws) -> Derived:
    """A noun derived of a base no record holds."""
    return _until_new(draws, _draw_derived, lambda noun: [*derive(noun), verbal_noun(noun.base)])


def is_new(forms: Iterable[str]) -> bool:
    """Whether none of `forms` is a recorded form, also without diacritics."""
    return _recorded_forms().isdisjoint(map(bare, forms))


def _until_new(draws: Draws, draw: Callable[[Draws], W], forms: Callable[[W], Iterable[str]]) -> W:
    recorded = _recorded_forms()
    for _ in range(_ATTEMPTS):
        word = draw(draws)
        if bare(_lemma(word)) not in recorded and not any(bare(form) in recorded for form in forms(word)):
            return word
    raise AssertionError(f"no new word in {_ATTEMPTS} draws")


def _lemma(word: Verb | Noun | Kin | Derived) -> str:
    return word.base if isinstance(word, Derived) else word.lemma


def _kin_forms(kin: Kin) -> list[str]:
    verb = have_as(kin)
    owned = [form for owner in ("2sg", "3sg") if owner in kin.forms for form in relative_of(kin, owner)]
    generic = somebodys(kin) if "3sg" in kin.forms else ()
    return [*owned, *generic, *(form for p in ("3sg", *verb.persons) for form in conjugate(verb, p))]


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


def _draw_kin(draws: Draws) -> Kin:
    """A term whose -ku or -tku the rules settle: not one in iŋ."""
    while True:
        lemma = _word(draws, starts_with_vowel=False)
        if not lemma.endswith("iŋ"):
            return Kin(
                lemma=lemma, relation=GLOSS, speaker="", forms=("2sg", "3sg", "ya"), root=lemma, rules=()
            )


def _draw_derived(draws: Draws) -> Derived:
    """Only wo- has a rule for a final a, so the other prefixes get no base that ends in one."""
    kind, part, rule = draws.pick(_DERIVED_KINDS)
    while True:
        base = _word(draws, starts_with_vowel=kind == "agent")
        if kind in ("abstract", "little") or not base.endswith(("a", "aŋ")):
            break
    return Derived(
        base=base,
        gloss=GLOSS,
        part=part,
        kind=kind,
        final="either" if kind == "abstract" and not base.endswith("aŋ") else "keeps",
        noun_gloss="",
        root=base,
        rules=(rule,),
    )


_DERIVED_KINDS = (
    *[("abstract", "adjective", "NOUN-01"), ("abstract", "verb", "NOUN-01")] * 2,
    *[("place", "verb", "NOUN-02")] * 3,
    # Before a consonant wa- could also be the marker of I; before a vowel it is not asked of verbs.
    *[("agent", "verb", "NOUN-03")] * 3,
    ("human", "verb", "NOUN-04"),
    ("human", "adjective", "NOUN-04"),
    ("human", "body part", "NOUN-04"),
    *[("ruminant", "body part", "NOUN-06")] * 2,
    *[("little", "noun", "NOUN-08")] * 2,
)


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
    forms.update(form for kin in corpus.kin for form in _kin_forms(kin))
    forms.update(form for noun in corpus.derived for form in derive(noun))
    from dakota1890.families.objects import OBJECTS  # it is built on this module

    assert OBJECTS.recorded is not None
    forms.update(form for question in OBJECTS.recorded() for form in question.accept)
    return frozenset(map(bare, forms))
