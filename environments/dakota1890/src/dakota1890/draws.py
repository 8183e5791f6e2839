"""Small counter-based random stream: cheap to start at any index, equal on every machine and Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


class Draws:
    """SplitMix64 generator (Steele, Lea and Flood 2014) started from (seed, index)."""

    __slots__ = ("_state",)

    def __init__(self, seed: int, index: int) -> None:
        self._state = (seed * 0xD1342543DE82EF95 + index * 0xA0761D6478BD642F) & _MASK
        self.next()

    def next(self) -> int:
        """Return 64 random bits."""
        self._state = (self._state + _GAMMA) & _MASK
        bits = self._state
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
        return bits ^ (bits >> 31)

    def below(self, limit: int) -> int:
        """Return an integer in [0, limit)."""
        return (self.next() * limit) >> 64

    def pick(self, items: Sequence[T]) -> T:
        """Return one of `items`."""
        return items[self.below(len(items))]
