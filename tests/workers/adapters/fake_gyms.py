"""Minimal libraries like gymnasium and skyrl-gym, with environments whose rules the tests know.

`Corridor-v0` has the cells 0 to 2. A step costs 0.5, and the goal is cell 2. `guess` rewards the word of the
task, and accepts three replies.
"""

import sys
from types import MappingProxyType, ModuleType, SimpleNamespace

closed = []
"""Names of the environments that were closed."""


def space(kind, n=2, start=0):
    return type(kind, (), {"n": n, "start": start})()


class Corridor:
    """Corridor of three cells.

    ## Description
    Walk to the [<a href="#goal">goal</a>].

    ## Version History
    * v0
    """

    metadata = MappingProxyType({"render_modes": ["ansi"]})
    action_space = space("Discrete")
    observation_space = "cells"

    def __init__(self, cost=0.5, render_mode=None):
        self.cost = cost

    @property
    def unwrapped(self):
        return self

    def reset(self, seed):
        self.cell = seed % 2
        return self.cell, {}

    def render(self):
        return "".join(f"\x1b[41m{cell}\x1b[0m" if cell == self.cell else str(cell) for cell in range(3))

    def step(self, action):
        self.cell = max(0, self.cell + (1 if action else -1))
        return self.cell, -self.cost, self.cell == 2, False, {}

    def close(self):
        closed.append(type(self).__name__)


class Numbers(Corridor):
    """Corridor that shows numbers."""

    metadata = MappingProxyType({"render_modes": ["rgb_array"]})
    observation_space = "numbers"

    def reset(self, seed):
        super().reset(seed)
        return {"cell": self.cell, "rest": (0.123456, [1, 2])}, {}


class Words(Numbers):
    action_space = space("Text")

    def step(self, action):
        return action.upper(), len(action), True, False, {}


class Picture(Numbers):
    def reset(self, seed):
        return [0] * 4000, {}


class Steered(Numbers):
    action_space = space("Box")


class BrokenReset(Corridor):
    def reset(self, seed):
        if seed:
            raise OSError("no map")
        return super().reset(seed)


class BrokenStep(Corridor):
    def step(self, action):
        raise OSError("no such cell")


class Unscored(Corridor):
    def step(self, action):
        return 0, float("nan"), True, False, {}


class Guess:
    def __init__(self, env_config, extras):
        self.word = extras["reward_spec"]["ground_truth"]
        self.unit = env_config.get("unit", 1)
        self.turns = 0

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "Guess."}], {}

    def step(self, action):
        self.turns += 1
        if action == "fall":
            raise OSError("the game fell over")
        done = action == self.word or self.turns == 3
        output = {"reward": self.unit * (action == self.word), "done": done, "metadata": {}}
        if action.startswith(" "):
            output["postprocessed_action"] = action.strip()
        return {**output, "observations": [] if done else [{"role": "user", "content": f"not {action}"}]}

    def get_metrics(self):
        return {"guesses": self.turns, "word": self.word}

    def close(self):
        closed.append("Guess")


GAMES = (Corridor, Numbers, Words, Picture, Steered, BrokenReset, BrokenStep, Unscored)


def install(monkeypatch):
    """Make `import gymnasium` and `import skyrl_gym` find these environments."""
    closed.clear()
    games = {f"{game.__name__}-v0": game for game in GAMES}
    gymnasium, skyrl_gym, omegaconf = map(ModuleType, ("gymnasium", "skyrl_gym", "omegaconf"))
    gymnasium.registry = {name: SimpleNamespace(max_episode_steps=None) for name in games}

    def make(name, max_episode_steps=None, disable_env_checker=False, **settings):
        return games[name](**settings)

    gymnasium.make = make
    skyrl_gym.registry = {"guess": None}
    skyrl_gym.make = lambda name, env_config, extras: Guess(env_config, extras)
    omegaconf.OmegaConf = SimpleNamespace(create=dict)
    for module in (gymnasium, skyrl_gym, omegaconf):
        monkeypatch.setitem(sys.modules, module.__name__, module)
