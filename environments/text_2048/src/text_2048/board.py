"""The game: a board of powers of two, and moves in four directions."""

from __future__ import annotations

import random

DIRECTIONS = ("up", "down", "left", "right")


class Game:
    """One game. Equal seeds, sizes and moves give equal boards."""

    def __init__(self, seed: int, size: int = 4) -> None:
        """Create a board with two tiles. `size` is from 2 to 8."""
        self._random = random.Random(f"text-2048/{seed}/{size}")  # noqa: S311  not for secrets
        self.size = size
        self.cells = [[0] * size for _ in range(size)]
        self.moves = 0
        self.score = 0
        self._add_tile()
        self._add_tile()

    @property
    def highest(self) -> int:
        """Largest tile."""
        return max(map(max, self.cells))

    @property
    def is_over(self) -> bool:
        """True if no direction changes the board."""
        return not self.legal_moves

    @property
    def legal_moves(self) -> list[str]:
        """Directions that change the board."""
        return [direction for direction in DIRECTIONS if self._apply_move(direction)[0] != self.cells]

    def move(self, direction: str) -> bool:
        """Move all tiles and add a new one.

        Return False without a change if no tile can move in that direction.
        """
        cells, gained = self._apply_move(direction)
        if cells == self.cells:
            return False
        self.cells = cells
        self.score += gained
        self.moves += 1
        self._add_tile()
        return True

    def __str__(self) -> str:
        """Return the board as text: one line per row, a dot for an empty cell."""
        width = len(str(self.highest))
        return "\n".join(" ".join(str(cell or ".").rjust(width) for cell in row) for row in self.cells)

    def _apply_move(self, direction: str) -> tuple[list[list[int]], int]:
        """Return the board after a move without its new tile, and the sum of the merged tiles."""
        rows = self.cells if direction in ("left", "right") else _transpose(self.cells)
        forward = direction in ("left", "up")
        slid_rows = [_slide_row(row if forward else row[::-1]) for row in rows]
        moved = [row if forward else row[::-1] for row, _ in slid_rows]
        cells = moved if direction in ("left", "right") else _transpose(moved)
        return cells, sum(gained for _, gained in slid_rows)

    def _add_tile(self) -> None:
        empty = [(y, x) for y in range(self.size) for x in range(self.size) if not self.cells[y][x]]
        y, x = self._random.choice(empty)
        self.cells[y][x] = 4 if self._random.random() < 0.1 else 2


def _slide_row(row: list[int]) -> tuple[list[int], int]:
    """Return a row moved to its beginning, and the sum of the merged tiles; a tile merges at most once."""
    tiles = [cell for cell in row if cell]
    merged: list[int] = []
    gained = 0
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
            gained += tile
        merged.append(tile)
    return merged + [0] * (len(row) - len(merged)), gained


def _transpose(cells: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*cells, strict=True)]
