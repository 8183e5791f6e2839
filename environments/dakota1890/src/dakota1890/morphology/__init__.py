"""How Dakota words are formed.

Each function returns every form the record licenses, the preferred one first. The rule identifiers in the
docstrings are those of `data/rules.json`.
"""

from dakota1890.morphology.nouns import possess
from dakota1890.morphology.numerals import UNITS, numeral
from dakota1890.morphology.objects import (
    absolute,
    benefactive,
    causative,
    dative,
    object_pairs,
    possessive,
    reflexive,
    reflexive_persons,
    with_object,
)
from dakota1890.morphology.sounds import contracted, contracts, final_e
from dakota1890.morphology.verbs import PERSONS, conjugate, with_particle

__all__ = [
    "PERSONS",
    "UNITS",
    "absolute",
    "benefactive",
    "causative",
    "conjugate",
    "contracted",
    "contracts",
    "dative",
    "final_e",
    "numeral",
    "object_pairs",
    "possess",
    "possessive",
    "reflexive",
    "reflexive_persons",
    "with_object",
    "with_particle",
]
