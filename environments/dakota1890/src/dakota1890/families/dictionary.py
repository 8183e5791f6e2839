"""The word for a gloss, and the gloss for a word."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from dakota1890.corpus import Entry, load_corpus
from dakota1890.morphology import conjugate, possess
from dakota1890.morphology.kinship import relative_of
from dakota1890.orthography import canonical
from dakota1890.questions import MEANING, WORD, Family, Question, unique
from dakota1890.splits import gloss_parts

_PARTS_OF_SPEECH = {
    "n.": "noun",
    "v.a.": "verb",
    "v.n.": "verb",
    "adj.": "adjective",
    "adv.": "adverb",
    "prep.": "postposition",
    "name": "name",
}

_BETWEEN_SENSES = re.compile("[,;] *")
_LEADING = re.compile("^(?:a|an|the|to) ")
_SAID = frozenset({"in", "only", "the", "put", "give", "of", "meaning"})
"""What the prompt says anyway."""


@lru_cache(maxsize=1)
def _recorded() -> Sequence[Question]:
    return [*map(word_for, _of_new_senses()), *_meanings()]


DICTIONARY = Family(name="dictionary", recorded=_recorded)


@lru_cache(maxsize=1)
def dictionary_entries() -> tuple[Entry, ...]:
    """Single words with a printed English gloss that do not show the word and that no rule derives."""
    derived = {form for verb in load_corpus().verbs for p in verb.persons for form in conjugate(verb, p)}
    derived |= {
        form for noun in load_corpus().nouns for person in noun.persons for form in possess(noun, person)
    }
    derived |= {
        form
        for kin in load_corpus().kin
        for owner in ("2sg", "3sg")
        if owner in kin.forms
        for form in relative_of(kin, owner)
    }
    # The exceptions are only evaluated: no dictionary question may give them away.
    derived |= {form for irregular in load_corpus().irregulars for form in irregular.forms}
    return tuple(
        entry
        for entry in load_corpus().entries
        if entry.status in ("sound", "corrected")
        and entry.pos in _PARTS_OF_SPEECH
        and " " not in entry.form
        and entry.gloss.isascii()
        and canonical(entry.form) not in derived
        and canonical(entry.form) not in canonical(entry.gloss).replace("(", " ").split()
    )


@lru_cache(maxsize=1)
def _of_new_senses() -> tuple[Entry, ...]:
    """The entries without those that share a sense with an earlier one: synonyms are one question."""
    known: set[str] = set()
    found = []
    for entry in dictionary_entries():
        if known.isdisjoint(gloss_parts(entry)):
            found.append(entry)
        known |= gloss_parts(entry)
    return tuple(found)


def part_of_speech(entry: Entry) -> str:
    """`noun`, `verb` and so on."""
    return _PARTS_OF_SPEECH[entry.pos]


def word_for(entry: Entry) -> Question:
    """Ask for the word that the gloss of `entry` means."""
    word = canonical(entry.form)
    return Question(
        family="dictionary",
        facts=(f"{word}/gloss",),
        cells=(),
        lemma_ids=(word,),
        rule_ids=(),
        depth=1,
        ask=f'Give the Dakota word for "{entry.gloss}" ({part_of_speech(entry)}).',
        rule="",
        answer=WORD,
        accept=unique([word, *_synonyms(entry)]),
    )


def _meanings() -> Iterator[Question]:
    """The other direction; words of one form and part of speech are one question."""
    same: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in load_corpus().entries:
        if entry.pos in _PARTS_OF_SPEECH and entry.status != "excluded":
            same[canonical(entry.form), part_of_speech(entry)].append(entry)
    for entry in _of_new_senses():
        homonyms = same.pop((canonical(entry.form), part_of_speech(entry)), [])
        # Names, and glosses with brackets, do not list senses.
        if homonyms and entry.pos != "name" and not any("(" in homonym.gloss for homonym in homonyms):
            question = _meaning(
                entry, unique([s for h in homonyms for s in _senses(h.gloss, part_of_speech(h))])
            )
            if _SAID.isdisjoint(question.accept):
                yield question


def _meaning(entry: Entry, senses: tuple[str, ...]) -> Question:
    return replace(
        word_for(entry),
        ask=f'Give the English meaning of the Dakota {part_of_speech(entry)} "{canonical(entry.form)}".',
        answer=MEANING,
        accept=senses,
        prompt_forms=(canonical(entry.form),),
        floor_forms=(canonical(entry.form),),
    )


def _senses(gloss: str, part: str) -> list[str]:
    """The printed senses, each also without its article or "to" or with one, and the gloss as a whole:
    `to bind, tie` -> to bind, bind, to tie, tie, to bind, tie.
    """
    before = {"noun": ("", "a ", "the "), "verb": ("", "to ")}.get(part, ("",))
    senses = [canonical(sense) for sense in _BETWEEN_SENSES.split(gloss)]
    bare_senses = [_LEADING.sub("", sense) for sense in senses]
    spelled = [_opened(opening, sense) for sense in bare_senses for opening in before]
    return [senses[0], *spelled, canonical(gloss)]


def _opened(opening: str, sense: str) -> str:
    """`sense` after an article or "to": an enemy, a cloud."""
    return ("an " if opening == "a " and sense[0] in "aeiou" else opening) + sense


def _synonyms(entry: Entry) -> list[str]:
    """Other recorded words that share one of the senses of `entry`, and its dialect spellings."""
    parts, corpus = gloss_parts(entry), load_corpus()
    exceptions = {form for irregular in corpus.irregulars for form in irregular.forms}
    shared = [
        canonical(other.form)
        for other in corpus.entries
        if other.status != "excluded"
        and other.pos != "affix"
        and parts & gloss_parts(other)
        # Those that are only evaluated as exceptions are no answer here.
        and canonical(other.form) not in exceptions
    ]
    return shared + [spelling for spelling, kind in corpus.variants.get(entry.form, ()) if kind == "dialect"]
