"""Possessive forms of kin terms, and the verb to have a relative."""

from __future__ import annotations

from dakota1890.corpus import Kin, Verb


def relative_of(kin: Kin, owner: str) -> tuple[str, ...]:
    """Return the forms of `kin` for thy (2sg, POSS-08) or his and her (3sg, POSS-06, POSS-07)."""
    recorded = tuple(form for person, form in kin.attested if person == owner)
    if recorded:
        return recorded
    if owner == "2sg":
        return (f"ni{kin.lemma}",)
    # After i the record has both -tku and -ću, without the terms that take each.
    return tuple(kin.lemma + suffix for suffix in (("tku", "ću") if kin.lemma.endswith("i") else ("ku",)))


def relative_of_any_person(kin: Kin) -> tuple[str, ...]:
    """Return `kin` as the relative of any person: wića- before the form for his or her (NOUN-11)."""
    return tuple(f"wića{form}" for form in relative_of(kin, "3sg"))


def verb_of_having(kin: Kin) -> Verb:
    """Return the verb "to have as a relative" (POSS-12): -ya after the term, the person markers before it."""
    at = len(kin.lemma)
    return Verb(
        lemma=f"{kin.lemma}ya",
        gloss=f"to have as {kin.relation}",
        klass="I",
        at=at,
        dual_at=at,
        persons=("1sg", "2sg", "2pl", "3pl"),
        final="unknown",
        root=kin.root,
        rules=("VERB-02", "POSS-12"),
    )
