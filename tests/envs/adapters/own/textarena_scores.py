"""What textarena makes of moves: `python textarena_scores.py GAME < JOB`, a JSON list of `{"seed", "moves"}`;
prints the reward and what the game said after each move."""

import json
import random
import sys

import textarena as ta


def play(seed, moves):
    random.seed(seed)
    game = ta.make(sys.argv[1])
    game.reset(num_players=1, seed=seed)
    game.state.get_current_player_observation()
    said = []
    for move in moves:
        game.step(move)
        seen = game.state.get_current_player_observation()
        said.append([text for _, text, kind in seen if kind != ta.ObservationType.PLAYER_ACTION])
    rewards, _ = game.close()
    return {"reward": rewards[0] if rewards else None, "said": said}


print(json.dumps([play(**game) for game in json.load(sys.stdin)]))
