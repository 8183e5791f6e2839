"""Rewards of replies by skyrl-gym: `python skyrl_gym_scores.py NAME < JOB`.

JOB is a JSON list of `{"config", "row", "said"}`. The output has the rewards, and the observations, of each
reply until the episode ends.
"""

import json
import sys

import skyrl_gym
from omegaconf import OmegaConf


def play(config, row, said):
    extras = {name: value for name, value in row.items() if name != "prompt"}
    env = skyrl_gym.make(sys.argv[1], env_config=OmegaConf.create(config), extras=extras)
    env.init(row["prompt"])
    steps = []
    for text in said:
        output = env.step(text)
        steps.append((float(output["reward"]), [message["content"] for message in output["observations"]]))
        if output["done"]:
            break
    env.close()
    return steps


if __name__ == "__main__":  # the environment `lcb` starts processes
    print(json.dumps([play(**episode) for episode in json.load(sys.stdin)]))
