"""Persons of the verb, and the particles after it."""

from __future__ import annotations

from dakota1890.corpus import Verb
from dakota1890.morphology.sounds import final_e, with_we

PERSONS = ("3sg", "2sg", "1sg", "12", "3pl", "2pl", "1pl")
"""Persons in order: he, thou, I, we two (thou and I), they, you, we."""

_MARKERS = {"I": ("wa", "ya"), "III": ("ma", "ni")}


def conjugate(verb: Verb, person: str) -> tuple[str, ...]:
    """Return the forms of `verb` for `person` (VERB-01 to VERB-08; -pi: VERB-12, VERB-13; uŋk-: PHON-06)."""
    stem, plural = verb.lemma, "pi" if person.endswith("pl") else ""
    if person.startswith("3"):
        return (stem + plural,)
    if person in ("12", "1pl"):
        return tuple(form + plural for form in _with_we(verb))
    return (_with_i_or_thou(verb, thou=person.startswith("2")) + plural,)


def _with_i_or_thou(verb: Verb, *, thou: bool) -> str:
    before, after = verb.lemma[: verb.at], verb.lemma[verb.at :]
    if verb.klass == "II":  # VERB-04, VERB-06: y becomes md (I) or d (thou)
        return before + ("d" if thou else "md") + after.removeprefix("y")
    if verb.klass == "ki":  # VERB-03: wa + ki is we, ya + ki is ye
        return before + ("ye" if thou else "we") + after.removeprefix("ki")
    return before + _MARKERS[verb.klass][thou] + after


def _with_we(verb: Verb) -> tuple[str, ...]:
    before, after = verb.lemma[: verb.dual_at], verb.lemma[verb.dual_at :]
    full = before + with_we(after)
    if verb.klass == "II" and after.startswith("yu"):  # VERB-05; uŋyuštaŋpi and uŋhapi are both attested
        return before + "uŋ" + after.removeprefix("yu"), full
    return (full,)


def with_particle(form: str, final: str, particle: str) -> tuple[str, ...]:
    """Return `form` before kta (future, VERB-20) or šni (negation, VERB-23).

    `final` is the verb's behavior under PHON-02. Raises ValueError if the change of the final a is not
    recorded.
    """
    changed = final_e(form)
    if changed == form or final == "keeps":
        return (f"{form} {particle}",)
    if final == "unknown":
        raise ValueError(f"the end of {form!r} before {particle} is not recorded")
    forms = (f"{changed} {particle}", f"{form} {particle}")
    if final == "changes" and particle == "šni":
        return forms[:1]
    return forms if final == "changes" else forms[::-1]
