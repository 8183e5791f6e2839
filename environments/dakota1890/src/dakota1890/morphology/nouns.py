"""Possessed nouns."""

from __future__ import annotations

from dakota1890.corpus import Noun
from dakota1890.morphology.sounds import VOWELS, final_e

_ALIENABLE = {"1": "mita", "2": "nita", "3": "ta", "12": "uŋkita"}


def possess(noun: Noun, person: str) -> tuple[str, ...]:
    """Return the forms of `noun` with the owner `person` (POSS-01 to POSS-05); a plural owner adds -pi."""
    plural = "pi" if person.endswith("pl") else ""
    owner = "12" if person in ("12", "1pl") else person[0]
    if noun.klass == "inalienable":
        prefix = {"1": "mi", "2": "ni", "12": "uŋk" if noun.lemma[0] in VOWELS else "uŋ"}[owner]
        return (prefix + noun.lemma + plural,)
    return tuple(form + plural for form in _alienable(noun, _ALIENABLE[owner]))


def owned_by(owner: str, thing: str, *, several: bool) -> tuple[str, ...]:
    """Return OWNER THING tawa, or tawapi for several owners (POSS-09).

    With tawapi the record also has the thing first (woyute šuŋktaŋka tawapi).
    """
    if several:
        return f"{owner} {thing} tawapi", f"{thing} {owner} tawapi"
    return (f"{owner} {thing} tawa",)


def _alienable(noun: Noun, prefix: str) -> tuple[str, ...]:
    lemma = noun.lemma
    if noun.klass == "alienable, abstract":  # POSS-05: the a of the prefix and the w of wo- are both dropped
        prefix, lemma = prefix[:-1], lemma.removeprefix("w")
    elif noun.klass == "alienable" and lemma[0] in "oi":  # POSS-03
        prefix = prefix[:-1]
    kept, changed = prefix + lemma, prefix + final_e(lemma)
    if not lemma.endswith("a") or any(form.endswith("a") for _, form in noun.attested):
        return (kept,)
    return (changed, kept) if noun.attested else (kept, changed)  # PHON-08: a may become e
