"""Questions about relatives: their terms, their possessives, and the verb to have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from dakota1890.corpus import Entry, Kin, load_corpus
from dakota1890.families import conjugate as verbs
from dakota1890.morphology.kinship import relative_of, relative_of_any_person, verb_of_having
from dakota1890.orthography import canonical
from dakota1890.questions import FORM, WORD, WORDS, Family, Question

_OWNERS = {"man": "his", "woman": "her"}
_THIRD_RULE = "his or her relative takes -ku, after i -tku or -ću"


@lru_cache(maxsize=1)
def _recorded() -> Sequence[Question]:
    questions = [birth_name(entry) for entry in _names()]
    for kin in load_corpus().kin:
        questions += _about(kin)
    return questions


def _about(kin: Kin) -> Iterator[Question]:
    if "KIN-01" in kin.rules or "KIN-02" in kin.rules:
        for sex in ("man", "woman") if kin.speaker == "either" else (kin.speaker,):
            yield term(kin, sex)
    if "2sg" in kin.forms:
        yield thy(kin)
    if "3sg" in kin.forms:
        yield his_or_her(kin)
        yield anybodys(kin)
        yield from (named(kin, name) for name in _names() if kin.speaker in ("", "either", _sex(name)))
    if "ya" in kin.forms:
        yield from (having(kin, person) for person in ("1sg", "2sg", "3sg", "2pl", "3pl"))


KIN = Family(name="kin", recorded=_recorded)


def term(kin: Kin, sex: str) -> Question:
    """Ask for a man's or a woman's term for a relative."""
    return Question(
        family="kin",
        facts=(f"{kin.lemma}/gloss",),
        cells=(f"{sex}'s word|{'sibling' if 'KIN-01' in kin.rules else 'cousin or in-law'}",),
        lemma_ids=(kin.lemma,),
        rule_ids=tuple(rule for rule in kin.rules if rule.startswith("KIN")),
        depth=1,
        ask=f"What does a {sex} call {_OWNERS[sex]} {kin.relation}? Give the Dakota word.",
        rule="",
        answer=WORD,
        accept=(kin.lemma,),
    )


def thy(kin: Kin) -> Question:
    """Ask for a relative with the owner thou."""
    return _owned(kin, "2sg", f"thy {kin.relation}", "thy relative takes ni-", "POSS-08")


def his_or_her(kin: Kin) -> Question:
    """Ask for a relative with the owner he or she."""
    meaning = f"{_OWNERS.get(kin.speaker, 'his or her')} {kin.relation}"
    return _owned(kin, "3sg", meaning, _THIRD_RULE, "POSS-07" if kin.lemma.endswith("i") else "POSS-06")


def anybodys(kin: Kin) -> Question:
    """Ask for the relative of any person; the form for his or her is shown."""
    owned = his_or_her(kin)
    shown = owned.accept[0]
    return owned.with_added(
        facts=(f"{kin.lemma}/kinship/wića",),
        cells=(f"wića|{_klass(kin)}",),
        rule_ids=("NOUN-11",),
        depth=2,
        ask=f"{_introduce(kin)}, with owner \"{shown}\". Form: somebody's {kin.relation}, anyone's.",
        rule="wića- goes before the term with its owner",
        accept=relative_of_any_person(kin),
        prompt_forms=(kin.lemma, shown),
        floor_forms=(kin.lemma, shown),
    )


def named(kin: Kin, name: Entry) -> Question:
    """Ask for the relative of a person with a name."""
    owner = canonical(name.form)
    return his_or_her(kin).with_added(
        facts=(f"{kin.lemma}/kinship/{owner}",),
        cells=(f"name|{_klass(kin)}",),
        lemma_ids=(owner,),
        rule_ids=("POSS-10",),
        depth=2,
        ask=f'{_introduce(kin)} and the name "{owner}". Say: {name.form}\'s {kin.relation}.',
        rule=f"the name stands first; {_THIRD_RULE}",
        answer=WORDS,
        accept=tuple(f"{owner} {form}" for form in relative_of(kin, "3sg")),
        prompt_forms=(kin.lemma, owner),
        floor_forms=(kin.lemma, owner, f"{owner} {kin.lemma}", f"{kin.lemma} {owner}"),
    )


def having(kin: Kin, person: str) -> Question:
    """Ask for the verb to have a person as a relative, for `person`."""
    verb = verb_of_having(kin)
    verb_question = verbs.question(verb, person)
    return replace(
        verb_question,
        family="kin",
        cells=(*verb_question.cells, f"{person}|kinship, -ya"),
        lemma_ids=(kin.lemma,),
        depth={"3sg": 1, "2pl": 3}.get(person, 2),
        ask=(
            f'{_introduce(kin)}. Form the verb "to have as {kin.relation}" for: {verbs.PERSON_NAMES[person]}.'
        ),
        rule=f"-ya at the end makes the verb, with its marker before it; {verb_question.rule}",
        prompt_forms=(kin.lemma,),
        floor_forms=(kin.lemma, *(() if person == "3sg" else (verb.lemma,))),
    )


def birth_name(name: Entry) -> Question:
    """Ask for the name of a child by its place among its parents' children."""
    place, sex = name.gloss.partition("-born")[0], {"man": "boy", "woman": "girl"}[_sex(name)]
    return Question(
        family="kin",
        facts=(f"{canonical(name.form)}/gloss",),
        cells=(f"name|{sex}",),
        lemma_ids=(canonical(name.form),),
        rule_ids=("NOUN-12" if sex == "boy" else "NOUN-13",),
        depth=1,
        ask=f"What is a {place} child named in Dakota, if it is a {sex}?",
        rule="",
        answer=WORD,
        accept=(canonical(name.form),),
    )


def _owned(kin: Kin, owner: str, meaning: str, rule: str, rule_id: str) -> Question:
    return Question(
        family="kin",
        facts=(f"{kin.lemma}/kinship/{owner}",),
        cells=(f"{owner}|{_klass(kin)}",),
        lemma_ids=(kin.lemma,),
        rule_ids=(rule_id,),
        depth=1,
        ask=f"{_introduce(kin)}. Form: {meaning}.",
        rule=rule,
        answer=FORM,
        accept=relative_of(kin, owner),
        prompt_forms=(kin.lemma,),
        floor_forms=(kin.lemma,),
    )


def _klass(kin: Kin) -> str:
    return "kinship, after i" if kin.lemma.endswith("i") else "kinship"


def _introduce(kin: Kin) -> str:
    """Return `Dakota kin term "timdo" (a woman's elder brother)`."""
    gloss = f"a {kin.speaker}'s {kin.relation}" if kin.speaker in _OWNERS else kin.relation
    return f'Dakota kin term "{kin.lemma}" ({gloss})'


@lru_cache(maxsize=1)
def _names() -> tuple[Entry, ...]:
    """Return the names by order of birth (NOUN-12, NOUN-13)."""
    return tuple(entry for entry in load_corpus().entries if entry.pos == "name" and "-born" in entry.gloss)


def _sex(name: Entry) -> str:
    return "woman" if name.gloss.endswith("girl") else "man"
