"""Rewards of a game, from 0 to 1, computed from the board."""

from __future__ import annotations

import math

from text_2048.board import Game

EVALUATORS = ("max_number", "efficiency", "target")


def grade(game: Game, name: str, *, target: int = 2048, min_ratio: float = 10.0) -> float:
    """Return the reward of a game; 0 without a legal move.

    `max_number`: progress of the highest tile from 4, the highest first tile, to `target`, in doublings:
    log2(highest / 4) / log2(target / 4), at most 1.

    `efficiency`: the sum of the merged tiles per move, relative to `min_ratio`, at most 1.

    `target`: 1 if a tile is at least `target`, else 0.

    Raises ValueError for an unknown name.
    """
    if name not in EVALUATORS:
        raise ValueError(f"unknown evaluator {name!r}; known: {', '.join(EVALUATORS)}")
    if game.moves == 0:
        return 0.0
    if name == "target":
        return float(game.highest >= target)
    if name == "efficiency":
        return min(1.0, game.score / game.moves / min_ratio)
    return min(1.0, max(0.0, math.log2(game.highest / 4) / math.log2(target / 4)))
