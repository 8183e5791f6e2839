"""Servers of OpenEnv: `count` with texts as actions, and `sums` with actions of two fields."""

import random

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Text(Action):
    text: str


class Pair(Action):
    first: int
    second: int


class Seen(Observation):
    said: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self._state = State(step_count=0)

    @property
    def state(self):
        return self._state

    def reset(self, seed=None, unit=1, **_):
        if seed == 13:
            raise OSError("no game 13")
        self.number, self.unit = random.Random(seed).randint(1, 9), unit
        self._state = State(step_count=0)
        return Seen(said=f"Find {self.number} letters." if self.letters else f"Sum {self.number}.")


class Count(Game):
    """Reward for each lower letter in the first three characters; three turns."""

    letters = True

    def step(self, action, **_):
        if action.text == "fall":
            raise OSError("the game fell over")
        self._state.step_count += 1
        found = sum(character.islower() for character in action.text.strip()[:3])
        done = self._state.step_count == 3
        return Seen(said=f"{found} letters", reward=self.unit * found / 3, done=done)


class Sums(Game):
    """Reward at the end, for two numbers with the given sum."""

    letters = False

    def step(self, action, **_):
        right = action.first + action.second == self.number
        return Seen(said="right" if right else "wrong", reward=float(right) if right else None, done=right)


class Guess(Game):
    """Reward for the number of the task; a wrong number is answered with a hint."""

    letters = True

    def step(self, action, **_):
        said = action.text.strip()
        right = said == str(self.number)
        return Seen(said="right" if right else f"not {said}", reward=float(right), done=right)


count = create_app(Count, Text, Seen, env_name="count", max_concurrent_envs=64)
four_slots = create_app(Count, Text, Seen, env_name="four_slots", max_concurrent_envs=4)
guess = create_app(Guess, Text, Seen, env_name="guess", max_concurrent_envs=64)
sums = create_app(Sums, Pair, Seen, env_name="sums", max_concurrent_envs=64)
