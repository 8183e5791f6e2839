"""Nouns formed of other words."""

from __future__ import annotations

from dakota1890.corpus import Derived
from dakota1890.morphology.sounds import final_e

PREFIXES = {
    "abstract": "wo",
    "place": "o",
    "agent": "wa",
    "human": "wića",
    "ruminant": "ta",
    "bear": "wa",
    "fish": "ho",
}
"""Kind of noun -> its prefix (NOUN-01 to NOUN-04, NOUN-06, NOUN-07)."""


def derive(noun: Derived) -> tuple[str, ...]:
    """The forms of `noun`; what a final a does is its `final`."""
    if noun.kind == "little":  # NOUN-08; -na is the western form
        return noun.base + "daŋ", noun.base + "na"
    kept = PREFIXES[noun.kind] + noun.base
    changed = final_e(kept)
    if changed == kept or noun.final == "keeps":
        return (kept,)
    return (changed,) if noun.final == "changes" else (changed, kept)


def verbal_noun(verb: str) -> str:
    """The act: -pi after the verb (NOUN-05)."""
    return f"{verb}pi"
