"""Parts of a sentence: noun phrases, verbs in their persons, and single words."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dakota1890.corpus import SentenceWord
from dakota1890.morphology.sounds import VOWELS

DEMONSTRATIVES = {"this": "de", "that": "he", "these": "dena", "those": "hena"}
PLURAL_DETERMINERS = ("these", "those", "the several")

_GLOSSES = {
    "kiŋ": "the",
    "waŋ": "a",
    "kta": "will",
    "šni": "not",
    "he": "question",
    "ko": "and",
    "kiŋhaŋ": "if",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Words that stay together.

    forms: the words, in every licensed spelling. shown: the words of the first form, as a bag of words shows
    them. given: the uninflected words, with the information to inflect them; `plain` without it. rule: how
    they are inflected.
    """

    forms: tuple[tuple[str, ...], ...]
    shown: tuple[str, ...]
    given: tuple[str, ...]
    plain: tuple[str, ...]
    lemma_ids: tuple[str, ...] = ()
    rule_ids: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    rule: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NounPhrase:
    """Noun with its adjective and determiners, and its English."""

    part: Part
    english: str
    plural: bool


def particle(word: str, meaning: str = "") -> Part:
    """Return a function word."""
    return _word(word, meaning or _GLOSSES[word])


def single(word: SentenceWord) -> Part:
    """Return an uninflected content word."""
    return replace(_word(word.word, word.english[0]), lemma_ids=(word.word,))


def _word(word: str, meaning: str) -> Part:
    shown = f"{word} ({meaning})"
    return Part(forms=((word,),), shown=(shown,), given=(shown,), plain=(word,))


def join_parts(*parts: Part) -> Part:
    """Return the parts as one, in this order; each has one form."""
    return Part(
        forms=(tuple(word for part in parts for word in part.forms[0]),),
        shown=tuple(word for part in parts for word in part.shown),
        given=tuple(word for part in parts for word in part.given),
        plain=tuple(word for part in parts for word in part.plain),
        lemma_ids=tuple(lemma for part in parts for lemma in part.lemma_ids),
        rule_ids=tuple(rule for part in parts for rule in part.rule_ids),
        facts=tuple(fact for part in parts for fact in part.facts),
        cells=tuple(cell for part in parts for cell in part.cells),
        rule="; ".join(part.rule for part in parts if part.rule),
    )


def noun_phrase(noun: SentenceWord, adjective: SentenceWord | None, determiner: str) -> NounPhrase:
    """Return NOUN ADJECTIVE ARTICLE DEMONSTRATIVE (ADJ-01, ART-01, PRON-05).

    `determiner` is an English one, with "the several" for the plural.
    """
    plural = determiner in PLURAL_DETERMINERS
    parts, rule_ids = [single(noun)], ["ART-01"]
    if adjective is not None:
        parts.append(single(adjective))
        rule_ids.append("ADJ-01")
    parts.append(particle("waŋ" if determiner == "a" else "kiŋ"))
    if determiner in DEMONSTRATIVES:
        parts.append(particle(DEMONSTRATIVES[determiner], determiner))
        rule_ids += ["ADJ-01", "PRON-05"]
    part = join_parts(*parts)
    return NounPhrase(
        part=replace(part, rule_ids=tuple(rule_ids)),
        english=_english(noun, adjective, determiner, plural=plural),
        plural=plural,
    )


def english_noun(noun: SentenceWord, *, plural: bool) -> str:
    """Return `knife` or `knives`; a noun without an English plural has one form."""
    return noun.english[1] if plural and noun.english[1] else noun.english[0]


def with_a(english: str) -> str:
    """Return `a boy`, `an ox`."""
    return f"{'an' if english[0] in VOWELS else 'a'} {english}"


def _english(noun: SentenceWord, adjective: SentenceWord | None, determiner: str, *, plural: bool) -> str:
    words = english_noun(noun, plural=plural)
    if adjective is not None:
        words = f"{adjective.english[0]} {words}"
    if determiner == "a":
        return with_a(words)
    return f"{determiner.partition(' ')[0]} {words}"
