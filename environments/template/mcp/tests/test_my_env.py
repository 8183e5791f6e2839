"""The game, with hand-computed numbers."""

from my_env.server import HIGHEST, Game, setup


def test_halving_wins_the_game():
    game = Game(number=700)
    assert game.guess(500) == "higher"
    assert game.guess(750) == "lower"
    assert game.reward(within=10) == 0.0
    assert game.guess(700) == "found"
    assert game.reward(within=3) == 1.0
    assert game.reward(within=2) == 0.0


def test_every_number_can_be_found_in_ten_guesses():
    for number in range(1, HIGHEST + 1):
        game, low, high = Game(number), 1, HIGHEST
        while not game.found:
            middle = (low + high) // 2
            answer = game.guess(middle)
            low, high = (middle + 1, high) if answer == "higher" else (low, middle - 1)
        assert game.reward(within=10) == 1.0


def test_setup_states_the_range():
    assert setup(seed=1) == f"I have a number from 1 to {HIGHEST} in mind."
