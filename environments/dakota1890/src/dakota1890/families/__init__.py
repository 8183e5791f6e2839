"""The eight kinds of question, one module each."""

from __future__ import annotations

from dakota1890.families.conjugate import CONJUGATE
from dakota1890.families.exceptions import EXCEPTIONS
from dakota1890.families.kin import KIN
from dakota1890.families.numerals import NUMERALS
from dakota1890.families.objects import OBJECTS
from dakota1890.families.order import ORDER
from dakota1890.families.particles import PARTICLES
from dakota1890.families.possess import POSSESS
from dakota1890.questions import Family

_FAMILIES = (CONJUGATE, OBJECTS, POSSESS, KIN, NUMERALS, PARTICLES, ORDER, EXCEPTIONS)
FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}
