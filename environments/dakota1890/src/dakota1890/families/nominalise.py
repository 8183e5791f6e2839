"""Nouns formed of verbs, adjectives and other nouns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dakota1890.corpus import Derived, Verb, load_corpus
from dakota1890.draws import Draws
from dakota1890.families import conjugate as verbs
from dakota1890.invented import GLOSS, invented_base, invented_verb
from dakota1890.morphology import conjugate
from dakota1890.morphology.derivation import PREFIXES, derive, verbal_noun
from dakota1890.orthography import canonical
from dakota1890.questions import FORM, WORDS, Family, Question, unique

_MEANINGS = {
    "abstract": "the abstract noun",
    "place": "the noun of place or result",
    "agent": "the noun for the one who does it",
    "human": "the noun about human beings",
    "ruminant": "that part of a buffalo or deer",
    "bear": "that part of a bear",
    "fish": "that part of a fish",
    "little": "a little one",
}
_CAN = "okihi"
_CAN_PERSONS = ("1sg", "2sg", "2pl", "3pl")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Act:
    """A verb whose act is named: `facts`, `cells` and `rules` of its form with -pi, which is also "they"."""

    lemma: str
    gloss: str
    klass: str
    facts: tuple[str, ...]
    cells: tuple[str, ...]
    rules: tuple[str, ...] = ()
    invented: bool = False


@lru_cache(maxsize=1)
def _recorded() -> Sequence[Question]:
    return [*map(derived, load_corpus().derived), *_acts()]


def _acts() -> Iterator[Question]:
    (can,) = (verb for verb in load_corpus().verbs if verb.lemma == _CAN)
    for number, act in enumerate(_recorded_acts()):
        # Those in the lexicon and few others: lemma + pi would answer most of the family.
        noun = verbal_noun(act.lemma)
        if number % 4 == 0 or noun in _nouns():
            yield act_noun(act)
        elif number % 4 == 2 or f"{noun} kiŋ" in _nouns():
            yield the_act(act)
        if act.gloss.startswith("to ") and not act.gloss.startswith("to be") and act.lemma != _CAN:
            yield from (able(act, can, person) for person in _CAN_PERSONS)


def _recorded_acts() -> Iterator[_Act]:
    """Every verb of the lexicon that is not a state, with its class where it is known."""
    known = {verb.lemma: verb for verb in load_corpus().verbs}
    skipped = {form for irregular in load_corpus().irregulars for form in irregular.forms}
    skipped |= {verb.lemma for verb in known.values() if "3pl" not in verb.persons}
    for entry in load_corpus().entries:
        lemma = canonical(entry.form)
        if entry.pos not in ("v.a.", "v.n.") or entry.status not in ("sound", "corrected"):
            continue
        if lemma in skipped or " " in lemma:
            continue
        skipped.add(lemma)
        if lemma in known:
            yield _act(known[lemma])
        elif entry.gloss.startswith("to "):
            facts, cells = (f"{lemma}/pi",), ("-pi noun|verb",)
            yield _Act(lemma=lemma, gloss=entry.gloss, klass="verb", facts=facts, cells=cells)


def _act(verb: Verb) -> _Act:
    klass = f"{verb.klass}, inside" if verb.at else verb.klass
    return _Act(
        lemma=verb.lemma,
        gloss=verb.gloss,
        klass=klass,
        facts=(verbs.fact(verb, "3pl"),),
        cells=(verbs.cell(verb, "3pl"), f"-pi noun|{klass}"),
        rules=(*verb.rules, *verbs.number_rules("3pl")),
        invented=verb.gloss == GLOSS,
    )


def _invent(draws: Draws) -> Question:
    if draws.below(10) < 7:
        return derived(invented_base(draws))
    act = _act(invented_verb(draws))
    return act_noun(act) if draws.below(2) else the_act(act)


NOMINALISE = Family(name="nominalise", recorded=_recorded, invent=_invent)


def derived(noun: Derived) -> Question:
    """Ask for the noun of one kind that is formed of a base."""
    forms = derive(noun)
    changes = ", final a becomes e" if noun.final == "changes" else ""
    meaning = f' "{noun.noun_gloss}"' if noun.noun_gloss else ""
    facts = (f"{noun.attested}/gloss",) if noun.attested else ()
    return Question(
        family="nominalise",
        facts=(f"{noun.base}/{noun.kind}", *facts),
        cells=(f"{noun.kind}|{noun.part}",),
        lemma_ids=unique([noun.base, *filter(None, [noun.attested])]),
        rule_ids=noun.rules,
        depth=1,
        ask=(
            f'Dakota {noun.part} "{noun.base}" ({noun.gloss}){changes}. '
            f"Form: {_MEANINGS[noun.kind]}{meaning}."
        ),
        rule=_affix_rule(noun),
        answer=FORM,
        accept=forms,
        prompt_forms=(noun.base,),
        floor_forms=(noun.base,),
        invented=noun.gloss == GLOSS,
    )


def act_noun(act: _Act) -> Question:
    """Ask for the noun that names the act."""
    form = verbal_noun(act.lemma)
    noun = () if act.invented or form not in _nouns() else (form,)
    return Question(
        family="nominalise",
        facts=(*act.facts, *(f"{form}/gloss" for form in noun)),
        cells=act.cells,
        lemma_ids=(act.lemma, *noun),
        rule_ids=(*act.rules, "NOUN-05"),
        depth=1,
        ask=f'Dakota verb "{act.lemma}" ({act.gloss}). Form: the noun that names the act.',
        rule="-pi at the end of the verb names the act",
        answer=FORM,
        accept=(form,),
        prompt_forms=(act.lemma,),
        floor_forms=(act.lemma,),
        invented=act.invented,
    )


def the_act(act: _Act) -> Question:
    """Ask for the act with its article."""
    noun = act_noun(act)
    (form,) = noun.accept
    return replace(
        noun,
        facts=(*noun.facts, f"{act.lemma}/pi/the"),
        cells=(*noun.cells, f"-pi noun, the|{act.klass}"),
        rule_ids=(*noun.rule_ids, "ART-01"),
        depth=2,
        ask=f'Dakota verb "{act.lemma}" ({act.gloss}). Form: the noun that names the act, with "the".',
        rule="-pi at the end of the verb names the act, and kiŋ after it is the article",
        answer=WORDS,
        accept=(f"{form} kiŋ",),
        floor_forms=(act.lemma, f"{act.lemma} kiŋ"),
    )


def able(act: _Act, can: Verb, person: str) -> Question:
    """Ask for being able to do the act: it is the object of the verb for can."""
    noun = the_act(act)
    (form,) = noun.accept
    return replace(
        noun,
        facts=(*noun.facts, verbs.fact(can, person)),
        cells=(*noun.cells, verbs.cell(can, person)),
        lemma_ids=(*noun.lemma_ids, can.lemma),
        rule_ids=unique([*noun.rule_ids, "SYN-06", *can.rules, *verbs.number_rules(person)]),
        depth=4,
        ask=(
            f'Dakota verbs "{act.lemma}" ({act.gloss}) and "{can.lemma}" ({can.gloss}), '
            f'marker after "{can.lemma[: can.at]}". Say for "{verbs.PERSON_NAMES[person]}": can do this.'
        ),
        rule=(
            "the act (-pi) with the article kiŋ comes first, the verb for can last; "
            f"{verbs.person_rule(can, person)}"
        ),
        accept=tuple(f"{form} {last}" for last in conjugate(can, person)),
        prompt_forms=(act.lemma, can.lemma),
        floor_forms=(act.lemma, f"{act.lemma} {can.lemma}", f"{act.lemma} kiŋ {can.lemma}"),
    )


def _affix_rule(noun: Derived) -> str:
    if noun.kind == "little":
        return "-daŋ at the end makes it little"
    may_change = "; a final a may become e" if noun.final == "either" else ""
    return f"{PREFIXES[noun.kind]}- at the start makes {_MEANINGS[noun.kind]}{may_change}"


@lru_cache(maxsize=1)
def _nouns() -> frozenset[str]:
    return frozenset(canonical(entry.form) for entry in load_corpus().entries if entry.pos == "n.")
