"""Minimal library like textarena, with games whose rules the tests know.

`Race-v0` has two players, White and Black. A player says `[1]` or `[2]`, and the one who brings the sum to 5
wins. The first invalid move is refused, and the second loses. White begins.
"""

import enum
import sys
from types import ModuleType, SimpleNamespace

ObservationType = enum.Enum("ObservationType", "PROMPT PLAYER_ACTION GAME_MESSAGE")


class State:
    def __init__(self, names):
        self.num_players = len(names)
        self.role_mapping = dict(enumerate(names)) | {-1: "GAME"}
        self.current_player_id = 1
        self.error_count = 0
        self.rewards = None
        self.game_info = {player: {"invalid_move": False} for player in range(len(names))}
        self.observations = {player: [] for player in range(len(names))}

    def tell(self, text, kind=ObservationType.GAME_MESSAGE, sender=-1, to=None):
        for player in self.observations if to is None else [to]:
            self.observations[player].append((sender, text, kind))

    def get_current_player_observation(self):
        seen, self.observations[self.current_player_id] = self.observations[self.current_player_id], []
        return seen


class Race:
    def __init__(self, shows_moves=True):
        self.shows_moves = shows_moves

    def reset(self, num_players, seed=None):
        assert num_players == 2, f"The number of players has to be 2, received {num_players}"
        self.state = State(["Black", "White"])
        self.total = 0
        self.state.tell("Say [1] or [2]: five wins." if self.shows_moves else "Say one or two.")

    def step(self, action):
        state = self.state
        player = state.current_player_id
        state.tell(action, ObservationType.PLAYER_ACTION, player)
        if action not in ("[1]", "[2]"):
            state.error_count += 1
            state.tell("Not so.", to=player)
            if state.error_count > 1:
                state.game_info[player]["invalid_move"] = True
                state.rewards = {player: -1, 1 - player: 1}
            return state.rewards is not None, {}
        state.error_count = 0
        self.total += int(action[1])
        if self.total >= 5:
            state.rewards = {player: 1, 1 - player: -1}
        state.current_player_id = 1 - player
        return state.rewards is not None, {}

    def close(self):
        return self.state.rewards, self.state.game_info


class Words(Race):
    def __init__(self):
        raise LookupError("***\n  Resource 'words' not found.\n  >>> nltk.download('words')\n***")


class Sums(Race):
    def __init__(self):
        raise ImportError("Could not import games.Sums. Error: No module named 'numpy.core'")


class Broken(Race):
    def reset(self, num_players, seed=None):
        raise FileNotFoundError("no such folder: boards/")


GAMES = {"Race-v0": Race, "Words-v0": Words, "Sums-v0": Sums, "Broken-v0": Broken}


def install(monkeypatch):
    """Make `import textarena` find this module."""
    library = ModuleType("textarena")
    library.ObservationType = ObservationType
    library.make = lambda env_id, **settings: GAMES[env_id](**settings)
    registration = ModuleType("textarena.envs.registration")
    registration.ENV_REGISTRY = {
        name: SimpleNamespace(kwargs={"shows_moves": True} if game is Race else {})
        for name, game in GAMES.items()
    }
    monkeypatch.setitem(sys.modules, "textarena", library)
    monkeypatch.setitem(sys.modules, "textarena.envs.registration", registration)
