"""Make texts for the console: counts with nouns, quoted names, and aligned columns."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

_MIN_WIDTH = 8


def counted(number: float, noun: str) -> str:
    """Return a number with its noun, such as `1 task` or `2.5 steps`."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:,.3g}"
    return f"{shown} {noun}{'' if shown == '1' else 's'}"


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, with left-aligned columns two spaces apart.

    In a terminal, the text of the widest columns is wrapped until the table fits into the width.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n".join(_format_lines(rows, width))


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    shown = (" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) for line in lines)
    return "".join(f"| {line} |\n" for line in shown)


def _format_lines(rows: Sequence[Sequence[str]], limit: int | None) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    while limit is not None and sum(widths) + 2 * (len(widths) - 1) > limit and max(widths) > _MIN_WIDTH:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in rows:
        cells = [_fold(cell, width) for cell, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            pieces = [cell[number] if number < len(cell) else "" for cell in cells]
            line = "  ".join(piece.ljust(width) for piece, width in zip(pieces, widths, strict=True))
            lines.append(line.rstrip())
    return lines


def _fold(cell: str, width: int) -> list[str]:
    """Return the text of a cell, wrapped to `width` characters."""
    return [cell] if len(cell) <= width else textwrap.wrap(cell, width) or [""]


def quoted(value: object) -> str:
    """Return a path or a name as one argument of a command that the user may copy."""
    return shlex.quote(str(value))
