"""Take a form apart: which word it is, for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dakota1890.corpus import Kin, Noun, Verb, load_corpus
from dakota1890.draws import Draws
from dakota1890.families import conjugate as verbs
from dakota1890.families import kin as relatives
from dakota1890.families import objects
from dakota1890.families import possess as owners
from dakota1890.invented import invented_noun, invented_verb, is_new
from dakota1890.morphology import object_pairs, with_object
from dakota1890.questions import JSON, Family, Question, unique

_NUMBERS = {"sg": "singular", "2": "dual", "pl": "plural"}
_MARKERS = {
    "I": "wa is I, ya is thou, uŋ (uŋk before a vowel) is we, a final pi is the plural",
    "II": "md is I and d is thou in place of y, uŋ is we (in place of yu), a final pi is the plural",
    "III": "ma is I, ni is thou, uŋ (uŋk before a vowel) is we, a final pi is the plural",
    "ki": "we is I and ye is thou in place of ki, uŋ before ki is we, a final pi is the plural",
    "unknown": "a final pi is the plural",
}
_OBJECT_MARKERS = (
    "ma is me, ni is thee or you, uŋ is us, wića is them; wa is I and ya is thou after these; "
    "ći is I and thee at once; a final pi is the plural of either"
)
_OWNER_MARKERS = {
    "inalienable": "mi is my, ni is thy, uŋ (uŋk before a vowel) is our, a final pi is a plural owner",
    "alienable": "mita is my, nita is thy, ta is his, uŋkita is our, without the last a before o or i; "
    "a final pi is a plural owner",
    "alienable, abstract": "mit is my, nit is thy, t is his, uŋkit is our, and the first w is lost; "
    "a final pi is a plural owner",
}
_LIKE_MARKERS = ("wa", "ya", "ma", "ni", "wić", "uŋ", "k", "ć", "a", "e", "i", "o")
_KIN_MARKERS = "ni before the term is thy; ku, tku or ću after it is his or her"


@dataclass(frozen=True, slots=True)
class _Keys:
    """JSON keys, and how the prompt names them with their values."""

    names: tuple[str, ...]
    described: str


_PERSON = _Keys(
    ("lemma", "person", "number"), '"lemma", "person" (1, 2 or 3) and "number" (singular, dual or plural)'
)
_OBJECT = _Keys(
    ("lemma", "subject", "object"),
    '"lemma", "subject" (I, thou, he, we two, we, you all, they) and "object" (me, thee, us, you all, them)',
)
_OWNER = _Keys(
    ("lemma", "owner", "number"),
    '"lemma", "owner" (1, 2 or 3) and "number" (of owners: singular, dual or plural)',
)
_RELATIVE = _Keys(("lemma", "owner"), '"lemma" and "owner" (2 or 3)')


@lru_cache(maxsize=1)
def _recorded() -> Sequence[Question]:
    corpus = load_corpus()
    found = [_verb_form(verb, person) for verb in corpus.verbs for person in verb.persons]
    for verb in corpus.verbs:
        if "object" in verb.derives:
            found += [_object_form(verb, *form) for form in _object_forms(verb).items()]
    for noun in corpus.nouns:
        if owners.EXCEPTION not in noun.rules:
            found += [_noun_form(noun, person) for person in noun.persons]
    for kin in corpus.kin:
        found += [_kin_form(kin, owner) for owner in ("2sg", "3sg") if owner in kin.forms]
    return found


def _invent(draws: Draws) -> Question:
    while True:
        kind = draws.below(3)
        if kind < 2:
            verb = invented_verb(draws)
            person = draws.pick(verb.persons)
            if not _verb_can_be_told(verb, person):
                continue
            if kind == 0:
                return _verb_form(verb, person)
            form, pairs = draws.pick([*_object_forms(verb).items()])
            if _takes_object(verb) and is_new([form]):
                return _object_form(verb, form, pairs)
        else:
            noun = invented_noun(draws)
            if _noun_can_be_told(noun):
                return _noun_form(noun, draws.pick(noun.persons))


PARSE = Family(name="parse", recorded=_recorded, invent=_invent)


def _verb_can_be_told(verb: Verb, person: str) -> bool:
    """Whether no marker can be taken for a part of the unknown lemma, nor a part of it for a marker."""
    after = verb.lemma[verb.at :]
    if verb.lemma.endswith("pi"):
        return False
    if verb.klass == "II":
        we = person in ("12", "1pl")
        return not after.startswith("y", 2) and not (we and not after.startswith("yu"))
    return verb.klass == "ki" or not after.startswith(_LIKE_MARKERS)


def _takes_object(verb: Verb) -> bool:
    """Whether the rules license objects for an invented verb of this shape."""
    return verb.klass in ("I", "II") and "1sg" in verb.persons


def _noun_can_be_told(noun: Noun) -> bool:
    """The same for a noun, whose final a may also have become e."""
    if noun.lemma.endswith(("pi", "a", "e")):
        return False
    return noun.klass != "inalienable" or not noun.lemma.startswith(_LIKE_MARKERS)


def _verb_form(verb: Verb, person: str) -> Question:
    asked = verbs.question(verb, person)
    form = asked.accept[0]
    return _parse(
        [asked],
        f'Dakota verb form "{form}" without an object ({verb.gloss}){_how(verb)}.',
        _PERSON,
        (f"{_value(verb.lemma)} {person[0]} {_NUMBERS[person[1:]]}",),
        _MARKERS[verb.klass],
        form,
    )


def _object_forms(verb: Verb) -> dict[str, list[tuple[str, str]]]:
    """Each form with an object, and the (subject, object) pairs that it stands for."""
    pairs: dict[str, list[tuple[str, str]]] = {}
    for subject, obj in object_pairs(verb):
        pairs.setdefault(with_object(verb, subject, obj), []).append((subject, obj))
    return pairs


def _object_form(verb: Verb, form: str, pairs: Sequence[tuple[str, str]]) -> Question:
    """One question about all that the form stands for."""
    return _parse(
        [objects.question(verb, *pair) for pair in pairs],
        f'Dakota verb form "{form}" with an object ({verb.gloss}){_how(verb)}.',
        _OBJECT,
        tuple(
            " ".join(map(_value, (verb.lemma, verbs.PERSON_NAMES[subject], objects.OBJECT_NAMES[obj])))
            for subject, obj in pairs
        ),
        _OBJECT_MARKERS,
        form,
    )


def _noun_form(noun: Noun, person: str) -> Question:
    asked = owners.question(noun, person)
    form = asked.accept[0]
    return _parse(
        [asked],
        f'Dakota noun "{form}" with its owner ({noun.gloss}), {noun.klass}.',
        _OWNER,
        (f"{_value(noun.lemma)} {person[0]} {_NUMBERS[person[1:]]}",),
        _OWNER_MARKERS[noun.klass],
        form,
    )


def _kin_form(kin: Kin, owner: str) -> Question:
    asked = relatives.thy(kin) if owner == "2sg" else relatives.his_or_her(kin)
    form = asked.accept[0]
    return _parse(
        [asked],
        f'Dakota kin term "{form}" with its owner ({kin.relation}).',
        _RELATIVE,
        (f"{_value(kin.lemma)} {owner[0]}",),
        _KIN_MARKERS,
        form,
    )


def _parse(
    asked: Sequence[Question], ask: str, keys: _Keys, accept: tuple[str, ...], rule: str, form: str
) -> Question:
    """The questions `asked`, the other way round."""
    return replace(
        asked[0],
        family="parse",
        facts=unique([fact for question in asked for fact in question.facts]),
        cells=unique([cell for question in asked for cell in question.cells]),
        rule_ids=unique([rule_id for question in asked for rule_id in question.rule_ids]),
        ask=f"{ask} Take it apart: give JSON with the keys {keys.described}.",
        rule=rule,
        answer=JSON,
        keys=keys.names,
        accept=accept,
        prompt_forms=(form,),
        floor_forms=(form,),
    )


def _how(verb: Verb) -> str:
    """`, class I, marker at the start`."""
    return verbs.introduce(verb).removeprefix(verbs.name(verb))


def _value(text: str) -> str:
    return text.lower().replace(" ", "_")
