"""Questions about a noun for an owner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from dakota1890.corpus import Noun, Person, PossessionNoun, load_corpus
from dakota1890.draws import Draws
from dakota1890.families.conjugate import FINAL_PI
from dakota1890.invented import GLOSS, invented_noun
from dakota1890.morphology.nouns import owned_by, possess
from dakota1890.questions import FORM, WORD, WORDS, Family, Question

OWNER_NAMES = {person.person: person.owner for person in load_corpus().persons}
_PREFIXES = {"1": "mita", "2": "nita", "3": "ta", "12": "uŋkita"}
EXCEPTION = "POSS-04"
"""Rule of the noun that only the exceptions ask for."""


@lru_cache(maxsize=1)
def _recorded() -> Sequence[Question]:
    nouns = [noun for noun in load_corpus().nouns if EXCEPTION not in noun.rules]
    affixed = [question(noun, person) for noun in nouns for person in noun.persons]
    owned = [of_owner(*pair, several=several) for pair in _owners() for several in (False, True)]
    return [*affixed, *map(free, load_corpus().persons), *owned]


def _owners() -> Iterator[tuple[PossessionNoun, PossessionNoun]]:
    """Yield each owner with each thing that it may own."""
    owned = load_corpus().owned
    for owner in owned:
        if owner.role in ("owner", "animal"):
            roles = ("anybody's",) if owner.role == "animal" else ("anybody's", "people's")
            yield from ((owner, thing) for thing in owned if thing.role in roles)


def _invent(draws: Draws) -> Question:
    noun = invented_noun(draws)
    if draws.below(8):
        return question(noun, draws.pick(noun.persons))
    owner = PossessionNoun(word=invented_noun(draws).lemma, role="owner", english=("owner", "owners"))
    thing = PossessionNoun(word=noun.lemma, role="people's", english=("thing",))
    return replace(of_owner(owner, thing, several=draws.below(2) == 1), invented=True)


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


def free(person: Person) -> Question:
    """Ask for the possessive pronoun used alone."""
    form = person.alone_form
    return Question(
        family="possess",
        facts=(f"{form}/gloss",),
        cells=(f"{person.person}|tawa",),
        lemma_ids=(form,),
        rule_ids=("PRON-04",),
        depth=1,
        ask=f'Give the Dakota word for "{person.alone}", standing alone.',
        rule="",
        answer=WORD,
        accept=(form,),
    )


def of_owner(owner: PossessionNoun, thing: PossessionNoun, *, several: bool) -> Question:
    """Ask for a thing as owned by an owner, or by several of them."""
    (one, many), (gloss,) = owner.english, thing.english
    ending = "tawapi" if several else "tawa"
    whose = f"{many}'" if several and many.endswith("s") else f"{many if several else one}'s"
    together, reversed_ = f"{owner.word} {thing.word}", f"{thing.word} {owner.word}"
    return Question(
        family="possess",
        facts=(f"{thing.word}/of {owner.word}/{ending}",),
        cells=(f"{ending}|{'animal' if owner.role == 'animal' else 'person'}",),
        lemma_ids=(owner.word, thing.word),
        rule_ids=("POSS-09",),
        depth=2,
        ask=f'Dakota "{thing.word}" ({gloss}) and "{owner.word}" ({one}). Say: the {whose} {gloss}.',
        rule="the owner stands before the thing, and tawa after it, with -pi for several owners",
        answer=WORDS,
        accept=owned_by(owner.word, thing.word, several=several),
        prompt_forms=(owner.word, thing.word, together, reversed_),
        floor_forms=(together, reversed_, f"{together} ta"),
    )


def noun_class(noun: Noun) -> str:
    """Return the class; alienable nouns that start with o or i are a separate one (POSS-03)."""
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
