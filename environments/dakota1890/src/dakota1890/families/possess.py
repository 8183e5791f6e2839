"""A noun for an owner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dakota1890.corpus import Noun, load_corpus
from dakota1890.draws import Draws
from dakota1890.families.conjugate import FINAL_PI
from dakota1890.invented import GLOSS, invented_noun
from dakota1890.morphology import possess
from dakota1890.morphology.nouns import FREE_POSSESSIVES, owned_by
from dakota1890.questions import FORM, WORD, WORDS, Family, Question

OWNER_NAMES = {
    "1sg": "my",
    "2sg": "thy",
    "3sg": "his or her",
    "12": "our (two owners)",
    "1pl": "our",
    "2pl": "your (plural)",
    "3pl": "their",
}
_FREE_NAMES = {
    "1sg": "mine",
    "2sg": "thine",
    "3sg": "his or hers",
    "12": "ours (two owners)",
    "1pl": "ours (more than two owners)",
    "2pl": "yours (plural)",
    "3pl": "theirs",
}
_PREFIXES = {"1": "mita", "2": "nita", "3": "ta", "12": "uŋkita"}
EXCEPTION = "POSS-04"
"""The rule of the noun that is asked only among the exceptions."""

_OWNERS = {
    "wićaštayatapi": ("chief", "chiefs"),
    "tataŋka": ("ox", "oxen"),
    "šuŋktaŋka": ("horse", "horses"),
    "wićašta": ("man", "men"),
    "wiŋyaŋ": ("woman", "women"),
    "hokšidaŋ": ("boy", "boys"),
    "akićita": ("soldier", "soldiers"),
    "toka": ("enemy", "enemies"),
    "koda": ("friend", "friends"),
}
_THINGS = {
    "tipi": "house",
    "woyute": "food",
    "maġa": "field",
    "isaŋ": "knife",
    "mazakaŋ": "gun",
    "owiŋža": "bed",
    "wowapi": "book",
    "ćaŋpahmihma": "waggon",
    "šuŋka": "dog",
    "kukuše": "swine",
    "peži": "grass",
    "mini": "water",
}
_ANIMALS = ("tataŋka", "šuŋktaŋka")
_FOR_ANIMALS = ("tipi", "woyute", "maġa", "peži", "mini")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Words:
    """An owner (its lemma, in English one and several) and a thing."""

    owner: str
    one: str
    several: str
    thing: str
    thing_gloss: str
    invented: bool = False


@lru_cache(maxsize=1)
def _recorded() -> Sequence[Question]:
    nouns = [noun for noun in load_corpus().nouns if EXCEPTION not in noun.rules]
    affixed = [question(noun, person) for noun in nouns for person in noun.persons]
    owned = [of_owner(words, several=several) for words in _owners() for several in (False, True)]
    return [*affixed, *map(free, FREE_POSSESSIVES), *owned]


def _owners() -> Iterator[_Words]:
    for owner, (one, several) in _OWNERS.items():
        for thing in _FOR_ANIMALS if owner in _ANIMALS else _THINGS:
            yield _Words(owner=owner, one=one, several=several, thing=thing, thing_gloss=_THINGS[thing])


def _invent(draws: Draws) -> Question:
    noun = invented_noun(draws)
    if draws.below(8):
        return question(noun, draws.pick(noun.persons))
    owner = invented_noun(draws)
    words = _Words(
        owner=owner.lemma,
        one="owner",
        several="owners",
        thing=noun.lemma,
        thing_gloss="thing",
        invented=True,
    )
    return of_owner(words, several=draws.below(2) == 1)


POSSESS = Family(name="possess", recorded=_recorded, invent=_invent)


def question(noun: Noun, person: str) -> Question:
    """Ask for `noun` as owned by `person`."""
    return Question(
        family="possess",
        facts=(f"{noun.lemma}/{noun.klass}/{person}",),
        cells=(f"{person}|{noun_class(noun)}",),
        lemma_ids=(noun.lemma,),
        rule_ids=noun.rules,
        depth=1,
        ask=f'Dakota noun "{noun.lemma}" ({noun.gloss}), {noun.klass}. Form: {OWNER_NAMES[person]}.',
        rule=_owner_rule(noun, person),
        answer=FORM,
        accept=possess(noun, person),
        prompt_forms=(noun.lemma,),
        floor_forms=(noun.lemma,),
        invented=noun.gloss == GLOSS,
    )


def free(person: str) -> Question:
    """Ask for the possessive that stands alone."""
    form = FREE_POSSESSIVES[person]
    return Question(
        family="possess",
        facts=(f"{form}/gloss",),
        cells=(f"{person}|tawa",),
        lemma_ids=(form,),
        rule_ids=("PRON-04",),
        depth=1,
        ask=f'Give the Dakota word for "{_FREE_NAMES[person]}", standing alone.',
        rule="",
        answer=WORD,
        accept=(form,),
    )


def of_owner(words: _Words, *, several: bool) -> Question:
    """Ask for a thing as owned by an owner, or by several of them."""
    owner, thing = words.owner, words.thing
    ending = "tawapi" if several else "tawa"
    owners = words.several if several else words.one
    whose = f"{owners}'" if several and owners.endswith("s") else f"{owners}'s"
    return Question(
        family="possess",
        facts=(f"{thing}/of {owner}/{ending}",),
        cells=(f"{ending}|{'animal' if owner in _ANIMALS else 'person'}",),
        lemma_ids=(owner, thing),
        rule_ids=("POSS-09",),
        depth=2,
        ask=(
            f'Dakota "{thing}" ({words.thing_gloss}) and "{owner}" ({words.one}). '
            f"Say: the {whose} {words.thing_gloss}."
        ),
        rule="the owner stands before the thing, and tawa after it, with -pi for several owners",
        answer=WORDS,
        accept=owned_by(owner, thing, several=several),
        prompt_forms=(owner, thing, f"{owner} {thing}", f"{thing} {owner}"),
        floor_forms=(f"{owner} {thing}", f"{thing} {owner}", f"{owner} {thing} ta"),
        invented=words.invented,
    )


def noun_class(noun: Noun) -> str:
    """The class, with the alienable nouns that start with o or i as one of their own (POSS-03)."""
    return "alienable, o or i" if noun.klass == "alienable" and noun.lemma[0] in "oi" else noun.klass


def _owner_rule(noun: Noun, person: str) -> str:
    owner = "12" if person in ("12", "1pl") else person[0]
    name, plural = OWNER_NAMES[person], FINAL_PI if person.endswith("pl") else ""
    if noun.klass == "inalienable":
        prefix = {"1": "mi", "2": "ni", "12": "uŋ (uŋk before a vowel)"}[owner]
        return f'"{name}" is {prefix} before the noun{plural}'
    prefix = _PREFIXES[owner]
    if noun.klass == "alienable, abstract":
        return f'"{name}" is {prefix[:-1]} before the noun, whose w goes{plural}'
    elided = f" ({prefix[:-1]} before o or i)" if noun.klass == "alienable" else ""
    return f'"{name}" is {prefix}{elided} before the noun{plural}'
