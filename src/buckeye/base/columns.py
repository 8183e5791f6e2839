"""Plain text for people: counts, and aligned columns (full width in a pipe, folded in a terminal)."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

_NARROWEST = 8


def counted(number: float, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is shown as 1: `1 task`, `2.5 steps`."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:,.3g}"
    return f"{shown} {noun}{'' if shown == '1' else 's'}"


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return left-aligned columns, two spaces apart. In a terminal the widest columns are folded until all
    fit.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n".join(_lines(rows, width))


def _lines(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in rows:
        cells = [_folded(cell, room) for cell, room in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            pieces = [cell[number] if number < len(cell) else "" for cell in cells]
            line = "  ".join(piece.ljust(room) for piece, room in zip(pieces, widths, strict=True))
            lines.append(line.rstrip())
    return lines


def _folded(cell: str, room: int) -> list[str]:
    """Return the lines of a cell; a cell that fits is one line."""
    return [cell] if len(cell) <= room else textwrap.wrap(cell, room) or [""]
