"""Rules of the game and its rewards, computed by hand."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_2048.board import DIRECTIONS, Game
from text_2048.grading import grade


def board(*rows):
    game = Game(seed=0, size=len(rows))
    game.cells = [list(row) for row in rows]
    return game


def without_new_tile(game, direction):
    """Return the cells after a move, without the new tile."""
    return game._apply_move(direction)[0]


def test_tiles_slide_and_merge_once():
    game = board((2, 2, 2, 2), (4, 0, 4, 8), (2, 4, 2, 4), (0, 0, 0, 2))
    assert without_new_tile(game, "left") == [[4, 4, 0, 0], [8, 8, 0, 0], [2, 4, 2, 4], [2, 0, 0, 0]]
    assert without_new_tile(game, "right") == [[0, 0, 4, 4], [0, 0, 8, 8], [2, 4, 2, 4], [0, 0, 0, 2]]
    assert without_new_tile(game, "up") == [[2, 2, 2, 2], [4, 4, 4, 8], [2, 0, 2, 4], [0, 0, 0, 2]]
    assert without_new_tile(game, "down") == [[0, 0, 0, 2], [2, 0, 2, 8], [4, 2, 4, 4], [2, 4, 2, 2]]


def test_score_is_sum_of_merged_tiles():
    game = board((2, 2, 4, 4), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0))
    assert game.move("left")
    assert (game.score, game.moves, game.highest) == (12, 1, 8)


def test_move_without_effect_returns_false_and_is_not_counted():
    game = board((2, 4), (4, 2))
    assert not any(game.move(direction) for direction in DIRECTIONS)
    assert game.is_over
    assert (game.moves, game.cells) == (0, [[2, 4], [4, 2]])


def test_equal_seeds_give_equal_games():
    moves = random.Random(1).choices(DIRECTIONS, k=200)
    games = [Game(seed=7), Game(seed=7), Game(seed=8)]
    for game in games:
        for direction in moves:
            game.move(direction)
    assert games[0].cells == games[1].cells
    assert games[0].cells != games[2].cells


@given(seed=st.integers(0, 10**9), size=st.integers(2, 5), moves=st.lists(st.sampled_from(DIRECTIONS)))
def test_move_changes_tile_sum_only_by_new_tile(seed, size, moves):
    """A move changes the sum of the tiles only by the new one, and succeeds exactly if it is legal."""
    game = Game(seed, size)
    for direction in moves:
        before, legal = sum(map(sum, game.cells)), game.legal_moves
        assert game.move(direction) == (direction in legal)
        added = sum(map(sum, game.cells)) - before
        assert added in ((2, 4) if direction in legal else (0,))
    cells = [cell for row in game.cells for cell in row if cell]
    assert all(math.log2(cell).is_integer() for cell in cells)


def test_board_as_text_aligns_columns():
    assert str(board((16, 0), (2, 4))) == "16  .\n 2  4"


def test_grade_equals_values_computed_by_hand(refusal):
    game = board((64, 2), (0, 0))
    game.moves, game.score = 20, 100
    assert grade(game, "max_number", target=256) == pytest.approx(4 / 6)  # 4 -> 64 of 4 -> 256
    assert grade(game, "max_number", target=32) == 1.0
    assert grade(game, "target", target=64) == 1.0
    assert grade(game, "target", target=128) == 0.0
    assert grade(game, "efficiency", min_ratio=10.0) == pytest.approx(0.5)
    with refusal(ValueError):
        grade(game, "best")


@pytest.mark.parametrize("name", ["max_number", "efficiency", "target"])
def test_game_without_moves_has_reward_0(name):
    assert grade(Game(seed=3), name, target=8) == 0.0


def test_one_legal_move_has_small_reward():
    """A policy that stops as soon as it can gets almost nothing."""
    rewards = []
    for seed in range(200):
        game = Game(seed)
        game.move(game.legal_moves[0])
        rewards.append(grade(game, "max_number"))
    assert max(rewards) <= 1 / 9  # an 8 at best
    assert sum(rewards) / len(rewards) < 0.02


def test_random_policy_matches_documented_baseline():
    """The mean reward of random legal moves, to the end of the game and after 30 of them."""
    whole, short = [], []
    for seed in range(100):
        game, rng = Game(seed), random.Random(seed)
        while legal := game.legal_moves:
            game.move(rng.choice(legal))
            if game.moves == 30:
                short.append(grade(game, "max_number"))
        whole.append(grade(game, "max_number"))
    assert sum(whole) / len(whole) == pytest.approx(0.51, abs=0.02)
    assert sum(short) / len(short) == pytest.approx(0.29, abs=0.02)
