"""Verbs with an object, and derived verbs: for another, to one's own, to oneself, to cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from dakota1890.corpus import Verb
from dakota1890.morphology.sounds import after_i, with_we

_OBJECTS = {"1sg": "ma", "2sg": "ni", "2pl": "ni", "3pl": "wića"}
_SUBJECTS = {"1": "wa", "2": "ya", "3": ""}
_SELVES = {"1": "mi", "2": "ni", "3": "i", "12": "uŋki"}
_WE = ("12", "1pl")


def object_pairs(verb: Verb) -> tuple[tuple[str, str], ...]:
    """Return the (subject, object) pairs whose form the record licenses for `verb`.

    Not licensed: we or you with each other, and class II with a subject marker or with "us".
    """
    pairs = [(subject, obj) for subject in ("3sg", "3pl") for obj in _OBJECTS]
    if verb.klass != "II":
        pairs += [("3sg", "1pl"), ("3pl", "1pl")]
    if verb.klass == "I":
        pairs += [("1sg", "2sg"), ("1sg", "2pl"), ("2sg", "1sg"), ("2pl", "1sg")]
        pairs += [(subject, "3pl") for subject in ("1sg", "2sg", "2pl", "12", "1pl")]
    return tuple(pair for pair in pairs if _we_is_placed(verb) or not set(pair) & set(_WE))


def _we_is_placed(verb: Verb) -> bool:
    return "1pl" in verb.persons or verb.klass == "unknown"


def with_object(verb: Verb, subject: str, obj: str) -> str:
    """Return `verb` with both persons marked (VERB-15, VERB-16); one -pi for any plural but them (VERB-12).

    `obj` is 1sg, 2sg, 1pl, 2pl or 3pl; he, she and it have no marker (VERB-17).
    """
    before, after = verb.lemma[: verb.at], verb.lemma[verb.at :]
    plural = "pi" if subject.endswith("pl") or obj in ("1pl", "2pl") else ""
    if obj == "1pl":
        marked = with_we(after)
    elif subject in _WE:
        marked = "wić" + with_we(after)
    elif subject == "1sg" and obj.startswith("2"):
        marked = "ći" + after_i(after)  # PHON-07
    else:
        marked = _OBJECTS[obj] + _SUBJECTS[subject[0]] + after
    return before + marked + plural


def dative(verb: Verb) -> Verb:
    """Return the verb to do it to another person: ki- before the stem (VERB-28), conjugated by VERB-03."""
    return _made_of(verb, "ki" + after_i(verb.lemma), "ki", ("1sg", "2sg", "12", "1pl", "2pl", "3pl"))


def benefactive(verb: Verb) -> Verb:
    """Return the verb to do it for another person, with kići in place of the markers (VERB-28).

    It has persons only if kići comes first.
    """
    before, after = verb.lemma[: verb.at], verb.lemma[verb.at :]
    lemma = before + "kići" + after_i(after)
    return replace(dative(verb), lemma=lemma) if not before else _made_of(verb, lemma, "unknown", ("3pl",))


def possessive(verb: Verb) -> Verb:
    """Return the verb to do it to one's own (POSS-11).

    It has hd in place of the first y or k, or ki in place of the markers.
    """
    before, after = verb.lemma[: verb.at], verb.lemma[verb.at :]
    lemma = f"{before}ki{after}" if before else "hd" + after[1:]
    return _made_of(verb, lemma, "unknown", ("3pl",))


def absolute(verb: Verb) -> Verb:
    """Return the verb to do it in general: wa- at the start (VERB-30); the markers keep their places."""
    at, dual_at = verb.at + 2, verb.dual_at + 2
    # The position of "we" in class II after another syllable is not recorded.
    persons = tuple(p for p in verb.persons if verb.klass != "II" or p not in _WE)
    return replace(_made_of(verb, f"wa{verb.lemma}", verb.klass, persons), at=at, dual_at=dual_at)


def causative(verb: Verb, suffix: str) -> Verb:
    """Return the verb to make a person do it, with the suffix ya or kiya (VERB-27); markers precede ya."""
    lemma = verb.lemma + suffix
    if suffix == "ya":
        return replace(_made_of(verb, lemma, "I", ("1sg", "2sg", "2pl", "3pl")), at=len(verb.lemma))
    return _made_of(verb, lemma, "unknown", ("3pl",))


def _made_of(verb: Verb, lemma: str, klass: str, persons: tuple[str, ...]) -> Verb:
    final = "keeps" if not lemma.endswith(("a", "aŋ")) else "unknown"
    return replace(
        verb,
        lemma=lemma,
        klass=klass,
        at=0,
        dual_at=0,
        persons=persons,
        final=final,
        derives=(),
        attested=(),
    )


def reflexive_persons(verb: Verb) -> tuple[str, ...]:
    """Return the persons whose reflexive form is licensed: with markers inside a verb, not the third."""
    inside = ("1sg", "2sg", "12", "1pl", "2pl")
    return inside if verb.at else ("3sg", *inside, "3pl")


def reflexive(verb: Verb, person: str) -> str:
    """Return the verb to do it to oneself (VERB-29, PRON-10).

    It has -ići- in place of the markers, or ihd- for a first y or k.
    """
    before, after = verb.lemma[: verb.at], verb.lemma[verb.at :]
    plural = "pi" if person.endswith("pl") else ""
    self_ = _SELVES["12" if person in _WE else person[0]]
    marked = f"{self_}ći{after_i(after)}" if before else f"{self_}hd{after[1:]}"
    return before + marked + plural


def _causatives(verb: Verb) -> tuple[Verb, ...]:
    """Return the causatives that the record licenses: after a final vowel kiya differs between verbs."""
    suffixes = ("ya", "kiya") if verb.lemma.endswith("ŋ") else ("ya",)
    return tuple(causative(verb, suffix) for suffix in suffixes)


DERIVED_VERBS: Mapping[str, Callable[[Verb], tuple[Verb, ...]]] = {
    "dative": lambda verb: (dative(verb),),
    "benefactive": lambda verb: (benefactive(verb),),
    "possessive": lambda verb: (possessive(verb),),
    "absolute": lambda verb: (absolute(verb),),
    "causative": _causatives,
}
"""Derived verbs of a verb, for each kind in `Verb.derives`."""
