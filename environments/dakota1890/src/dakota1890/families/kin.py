"""Relatives: who they are to whom, whose they are, and having them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from dakota1890.corpus import Entry, Kin, load_corpus
from dakota1890.draws import Draws
from dakota1890.families import conjugate as verbs
from dakota1890.invented import GLOSS, invented_kin
from dakota1890.morphology import conjugate
from dakota1890.morphology.kinship import have_as, relative_of, somebodys
from dakota1890.orthography import canonical
from dakota1890.questions import FORM, WORD, WORDS, Family, Question, unique

_PERSONS = ("1sg", "2sg", "3sg", "2pl", "3pl")
_OWNERS = {"man": ("his",), "woman": ("her",), "either": ("his", "her"), "": ("his or her",)}
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
                yield said_to(kin, sex)
            if "3sg" in kin.forms:
                yield said_of(kin, sex)
    if "2sg" in kin.forms:
        yield thy(kin)
    if "3sg" in kin.forms:
        yield his_or_her(kin)
        yield anybodys(kin)
        yield from (named(kin, name) for name in _names() if kin.speaker in ("", "either", _sex(name)))
    if "ya" in kin.forms:
        yield from (having(kin, person) for person in _PERSONS)
        # What kta and šni do to the final a of -ya is not recorded.
        yield from (having_with(kin, p, word) for p in ("2pl", "3pl") for word in verbs.PARTICLE_WORDS)


def _invent(draws: Draws) -> Question:
    """Not for ye, which is held out."""
    kin, kind = invented_kin(draws), draws.below(10)
    if kind < 2:
        return thy(kin)
    if kind < 5:
        return his_or_her(kin)
    if kind < 6:
        return anybodys(kin)
    if kind < 7:
        return having_with(kin, "3pl", draws.pick(("kta", "šni")))
    return having(kin, draws.pick(("1sg", "2sg", "3sg", "3pl")))


KIN = Family(name="kin", recorded=_recorded, invent=_invent)


def term(kin: Kin, sex: str) -> Question:
    """Ask what a man or a woman calls a relative."""
    pronoun = {"man": "his", "woman": "her"}[sex]
    return Question(
        family="kin",
        facts=(f"{kin.lemma}/gloss",),
        cells=(_term_cell(kin, sex),),
        lemma_ids=(kin.lemma,),
        rule_ids=tuple(rule for rule in kin.rules if rule.startswith("KIN")),
        depth=1,
        ask=f"What does a {sex} call {pronoun} {kin.relation}? Give the Dakota word.",
        rule="",
        answer=WORD,
        accept=(kin.lemma,),
    )


def thy(kin: Kin) -> Question:
    """Ask for a relative as thine."""
    return _form(kin, "2sg", f"thy {_relation(kin)}", "thy relative takes ni-", relative_of(kin, "2sg"))


def his_or_her(kin: Kin) -> Question:
    """Ask for a relative as his or hers."""
    meaning = f"{' or '.join(_OWNERS[kin.speaker])} {_relation(kin)}"
    return _form(kin, "3sg", meaning, _THIRD_RULE, relative_of(kin, "3sg"))


def said_to(kin: Kin, sex: str) -> Question:
    """Ask for thy relative without showing the term."""
    meaning = f'"thy {kin.relation}", said to a {sex}'
    return _without_term(thy(kin), kin, sex, meaning)


def said_of(kin: Kin, sex: str) -> Question:
    """Ask for his or her relative without showing the term."""
    meaning = f'"{_OWNERS[sex][0]} {kin.relation}"'
    return _without_term(his_or_her(kin), kin, sex, meaning)


def anybodys(kin: Kin) -> Question:
    """Ask for somebody's relative; the form for his or her is shown."""
    owned = his_or_her(kin)
    shown = owned.accept[0]
    return replace(
        owned,
        facts=(*owned.facts, f"{kin.lemma}/kinship/wića"),
        cells=(*owned.cells, f"wića|{_klass(kin)}"),
        rule_ids=(*owned.rule_ids, "NOUN-11"),
        depth=2,
        ask=(
            f'Dakota kin term "{kin.lemma}" ({_gloss(kin)}), with owner "{shown}". '
            f"Form: somebody's {_relation(kin)}, anyone's."
        ),
        rule="wića- goes before the term with its owner",
        accept=somebodys(kin),
        prompt_forms=(kin.lemma, shown),
        floor_forms=(kin.lemma, shown),
    )


def named(kin: Kin, name: Entry) -> Question:
    """Ask for the relative of somebody with a name."""
    owned, owner = his_or_her(kin), canonical(name.form)
    return replace(
        owned,
        facts=(*owned.facts, f"{kin.lemma}/kinship/{owner}"),
        cells=(*owned.cells, f"name|{_klass(kin)}"),
        lemma_ids=(kin.lemma, owner),
        rule_ids=(*owned.rule_ids, "POSS-10"),
        depth=2,
        ask=(
            f'Dakota kin term "{kin.lemma}" ({_gloss(kin)}) and the name "{owner}". '
            f"Say: {name.form}'s {kin.relation}."
        ),
        rule=f"the name stands first; {_THIRD_RULE}",
        answer=WORDS,
        accept=tuple(f"{owner} {form}" for form in relative_of(kin, "3sg")),
        prompt_forms=(kin.lemma, owner),
        floor_forms=(kin.lemma, owner, f"{owner} {kin.lemma}", f"{kin.lemma} {owner}"),
    )


def having(kin: Kin, person: str) -> Question:
    """Ask for the verb to have somebody as a relative, for `person`."""
    verb = have_as(kin)
    return Question(
        family="kin",
        facts=(verbs.fact(verb, person),),
        cells=(verbs.cell(verb, person), f"{person}|kinship, -ya"),
        lemma_ids=(kin.lemma,),
        rule_ids=(*verb.rules, *verbs.number_rules(person)),
        depth=1 if person == "3sg" else 3 if person == "2pl" else 2,
        ask=(
            f'Dakota kin term "{kin.lemma}" ({_gloss(kin)}). Form the verb "to have as {_relation(kin)}" '
            f"for: {verbs.PERSON_NAMES[person]}."
        ),
        rule=f"-ya at the end makes the verb, with its marker before it; {verbs.person_rule(verb, person)}",
        answer=FORM,
        accept=conjugate(verb, person),
        prompt_forms=(kin.lemma,),
        floor_forms=(kin.lemma, *(() if person == "3sg" else (verb.lemma,))),
        invented=kin.relation == GLOSS,
    )


def having_with(kin: Kin, person: str, particle: str) -> Question:
    """Ask for the verb to have somebody as a relative, for a plural `person`, with kta or šni."""
    plain, (meaning, rule_id) = having(kin, person), verbs.PARTICLE_WORDS[particle]
    (form,) = plain.accept
    return replace(
        plain,
        facts=(*plain.facts, f"{plain.facts[0]}/{particle}"),
        cells=(*plain.cells, f"{particle}|kinship, -ya"),
        rule_ids=(*plain.rule_ids, rule_id),
        depth=plain.depth + 1,
        ask=f"{plain.ask.removesuffix('.')}, {meaning}.",
        rule=f"{plain.rule}; {particle} follows for the {meaning}",
        accept=(f"{form} {particle}",),
        floor_forms=(*plain.floor_forms, f"{kin.lemma} {particle}"),
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


def _form(kin: Kin, owner: str, meaning: str, rule: str, accept: tuple[str, ...]) -> Question:
    wanted = {"2sg": ("POSS-08",), "3sg": ("POSS-07",) if kin.lemma.endswith("i") else ("POSS-06",)}[owner]
    return Question(
        family="kin",
        facts=(f"{kin.lemma}/kinship/{owner}",),
        cells=(f"{owner}|{_klass(kin)}",),
        lemma_ids=(kin.lemma,),
        rule_ids=wanted,
        depth=1,
        ask=f'Dakota kin term "{kin.lemma}" ({_gloss(kin)}). Form: {meaning}.',
        rule=rule,
        answer=FORM,
        accept=accept,
        prompt_forms=(kin.lemma,),
        floor_forms=(kin.lemma,),
        invented=kin.relation == GLOSS,
    )


def _without_term(owned: Question, kin: Kin, sex: str, meaning: str) -> Question:
    named_term = term(kin, sex)
    return replace(
        owned,
        facts=(*named_term.facts, *owned.facts),
        cells=(*named_term.cells, *owned.cells),
        rule_ids=unique([*named_term.rule_ids, *owned.rule_ids]),
        depth=2,
        ask=f"Give the Dakota word for {meaning}.",
        prompt_forms=(),
        floor_forms=(),
    )


def _term_cell(kin: Kin, sex: str) -> str:
    return f"{sex}'s word|{'sibling' if 'KIN-01' in kin.rules else 'cousin or in-law'}"


def _klass(kin: Kin) -> str:
    return "kinship, after i" if kin.lemma.endswith("i") else "kinship"


def _relation(kin: Kin) -> str:
    return "relative" if kin.relation == GLOSS else kin.relation


def _gloss(kin: Kin) -> str:
    return f"a {kin.speaker}'s {kin.relation}" if kin.speaker in ("man", "woman") else kin.relation


@lru_cache(maxsize=1)
def _names() -> tuple[Entry, ...]:
    """The names by order of birth (NOUN-12, NOUN-13)."""
    return tuple(entry for entry in load_corpus().entries if entry.pos == "name" and "-born" in entry.gloss)


def _sex(name: Entry) -> str:
    return "woman" if name.gloss.endswith("girl") else "man"
