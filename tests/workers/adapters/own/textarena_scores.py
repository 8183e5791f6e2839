"""Scores of moves by textarena: `python textarena_scores.py GAME < JOB`.

JOB is a JSON list of `{"seed", "moves"}`, optionally with `players`. The output holds the rewards, and the
game's text after each move.
"""

import json
import random
import sys

import textarena as ta


def play(seed, moves, players=1):
    random.seed(seed)
    game = ta.make(sys.argv[1])
    game.reset(num_players=players, seed=seed)
    game.state.get_current_player_observation()
    said = []
    for move in moves:
        game.step(move)
        seen = game.state.get_current_player_observation()
        said.append([text for _, text, kind in seen if kind != ta.ObservationType.PLAYER_ACTION])
    rewards, _ = game.close()
    return {"rewards": rewards and [rewards[player] for player in range(players)], "said": said}


print(json.dumps([play(**game) for game in json.load(sys.stdin)]))
