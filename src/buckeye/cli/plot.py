"""Curves as text, for a terminal or a pipe of any kind."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MARKS = "*ox+#@%&="
WIDTH, HEIGHT = 80, 16

_LABEL = 9


@dataclass(frozen=True, slots=True)
class Curve:
    """Step -> value, and what it is called. It has at least one point."""

    name: str
    points: Mapping[int, float]


def text_plot(curves: Sequence[Curve], *, width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """Lines of at most `width` characters, of which `height` have marks, one mark a curve; where two meet, it
    is that of the later one. Steps that share a column are shown by their mean."""
    steps = [step for curve in curves for step in curve.points]
    values = [value for curve in curves for value in curve.points.values()]
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    columns = width - _LABEL - 2
    field = [[" "] * columns for _ in range(height)]
    for mark, curve in zip(MARKS, curves, strict=False):
        shared: dict[int, list[float]] = defaultdict(list)
        for step, value in curve.points.items():
            shared[_place(step, first, last, columns)].append(value)
        for column, found in shared.items():
            field[height - 1 - _place(statistics.fmean(found), low, high, height)][column] = mark
    labels = {height - 1: low}
    if high > low:
        labels |= {0: high, (height - 1) // 2: (low + high) / 2}
    lines = []
    for number, row in enumerate(field):
        label = f"{labels[number]:.4g}" if number in labels else ""
        lines.append(f"{label:>{_LABEL}} |{''.join(row)}".rstrip())
    lines.append(f"{'':{_LABEL}} +{'-' * columns}")
    ends = f"{first}{last:>{columns - len(str(first))}}" if last > first else str(first)
    return [*lines, f"{'':{_LABEL}}  {ends}"]


def _place(value: float, low: float, high: float, places: int) -> int:
    """Which of so many places from `low` to `high` a value has."""
    return 0 if high <= low else min(places - 1, int((value - low) / (high - low) * places))
