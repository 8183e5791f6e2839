"""Rewards of actions by gymnasium: `python gymnasium_scores.py NAME < JOB`.

JOB is a JSON list of `{"seed", "settings", "actions"}`. The output has the reward of every action until the
episode ends.
"""

import json
import sys

import gymnasium


def play(seed, settings, actions):
    env = gymnasium.make(sys.argv[1], **settings)
    env.reset(seed=seed)
    rewards = []
    for action in actions:
        _, reward, terminated, truncated, _ = env.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            break
    return rewards


print(json.dumps([play(**episode) for episode in json.load(sys.stdin)]))
