"""A running game of the library `textarena`."""

from __future__ import annotations

import copy
import itertools
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from .base import AdapterError, Json, failed, scored

_MAX_PLAYERS = 15
"""Maximum number of players in the library's games."""
_SHOWN_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
_DIGITS = "0123456789"
_WRAPPERS_WITHOUT_MOVES = ("GameBoard", "GameMessages")
"""Prefixes of wrapper classes that hide the messages of other players."""

T = TypeVar("T")


class TextArenaGame:
    """Running game that was started with a seed.

    Games use Python's shared random generator, so each call into a game first sets the generator to this
    game's state.
    """

    def __init__(self, library: Any, game: str, settings: Json, seed: int, players: int) -> None:
        self._random = random.Random(seed).getstate()  # noqa: S311  not used for secrets
        self._move_random = random.Random(seed)  # noqa: S311  not used for secrets
        """Generator for random moves, separate from the game's generator."""
        self._env = self._with_own_random(lambda: library.make(env_id=game, **settings))
        self._action_type = library.ObservationType.PLAYER_ACTION
        self._with_own_random(lambda: self._env.reset(num_players=players, seed=seed))
        self._observations: dict[int, list[str]] = {}
        wrappers = [type(part).__name__ for part in _wrappers_and_game(self._env)]
        self._shows_moves = not any(name.startswith(_WRAPPERS_WITHOUT_MOVES) for name in wrappers)

    @property
    def player_names(self) -> list[str]:
        """Names of the players, in order of their numbers."""
        state = self._env.state
        return [
            str(state.role_mapping.get(player, f"Player {player}")) for player in range(state.num_players)
        ]

    @property
    def player(self) -> int:
        """Number of the player whose turn it is."""
        return int(self._env.state.current_player_id)

    def first_messages(self, player: int) -> str:
        """Return the game's first messages to a player."""
        return self._text(player, self._env.state.observations[player])

    def read_observation(self) -> str:
        """Return the new messages for the current player, from the game and the other players."""
        player = self.player
        text = self._text(player, self._env.state.get_current_player_observation())
        self._observations.setdefault(player, []).append(text)
        return text

    def _text(self, player: int, observations: list[Any]) -> str:
        return "\n\n".join(
            f"[{self.player_names[sender]}] {text}" if kind == self._action_type else str(text)
            for sender, text, kind in observations
            if kind != self._action_type or (sender != player and self._shows_moves)
        )

    def step(self, move: str) -> bool:
        """Make a move, and return True if the game is over."""
        done, _ = self._with_own_random(lambda: self._env.step(action=move))
        return bool(done)

    def random_move(self) -> str | None:
        """Return a random legal move, or None if none is found.

        Candidates are the moves in square brackets in the game's texts, and the same moves with other digits:
        "[3]" also gives "[7]".
        """
        shown = dict.fromkeys(_SHOWN_MOVE.findall("\n".join(self._observations.get(self.player, ()))))
        moves = list(dict.fromkeys(variant for move in shown for variant in _variants(move)))
        self._move_random.shuffle(moves)
        return next(filter(self._allows, moves), None)

    def _allows(self, move: str) -> bool:
        """Return True if a copy of the game accepts a move."""
        player, own_state = self.player, self._random
        trial = copy.deepcopy(list(_wrappers_and_game(self._env))[-1])
        try:
            self._with_own_random(lambda: trial.step(action=move))
        finally:
            self._random = own_state
        state = trial.state
        return not getattr(state, "error_count", 0) and not state.game_info[player].get("invalid_move")

    def outcome(self, player: int, turns: int) -> Json:
        """Return the outcome of the finished game for a player."""
        rewards, infos = self._env.close()
        if not rewards or player not in rewards:
            return failed("score", "NoReward", "the game ended without a reward")
        reward = float(rewards[player])
        illegal = {
            number for number in range(len(self.player_names)) if infos.get(number, {}).get("invalid_move")
        }
        components = {"game_reward": reward, "turns": turns, "illegal_move": float(player in illegal)}
        if len(self.player_names) > 1:
            components["opponent_illegal_move"] = float(bool(illegal - {player}))
        return scored(
            min(1.0, max(0.0, reward)),
            components=components,
            stop_reason="illegal_move" if player in illegal else "game_over",
        )

    def _with_own_random(self, call: Callable[[], T]) -> T:
        shared_state = random.getstate()
        random.setstate(self._random)
        try:
            return call()
        finally:
            self._random = random.getstate()
            random.setstate(shared_state)


def fewest_players(library: Any, game: str, settings: Json, seed: int) -> int:
    """Return the smallest number of players for a game. Raises AdapterError if the game cannot be set up."""
    first_error: Exception | None = None
    for players in range(1, _MAX_PLAYERS + 1):
        try:
            TextArenaGame(library, game, settings, seed, players)
        except (AssertionError, ValueError) as error:  # raised for a wrong number of players
            first_error = first_error or error
        except Exception as error:
            raise AdapterError(_setup_error(game, error)) from error
        else:
            return players
    assert first_error is not None
    raise AdapterError(_setup_error(game, first_error)) from first_error


def _setup_error(game: str, error: Exception) -> str:
    """Return the reason why a game cannot be set up, with a hint if known."""
    message = " ".join(str(error).replace("*", " ").split())
    data = re.search(r"nltk\.download\('([^']+)'\)", message)
    module = re.search(r"No module named '([^'.]+)", message)
    if data:
        message = f"it needs the nltk data {data[1]!r}, which is not installed"
        hint = f"Download it: {sys.executable} -m nltk.downloader {data[1]}"
    elif module:
        hint = f"Install it: buckeye env install textarena --with {module[1]} --force"
    elif isinstance(error, SyntaxError):
        hint = "Use a newer Python: buckeye env install textarena --python 3.12 --force"
    else:
        hint = ""
    message = message[:500].rstrip(".")
    return f"cannot set up textarena/{game}: {type(error).__name__}: {message}{hint and f'. {hint}'}"


def _wrappers_and_game(env: Any) -> Iterator[Any]:
    """Yield a game's wrappers from the outside in, and then the game."""
    yield env
    while "env" in vars(env):
        env = vars(env)["env"]
        yield env


def _variants(move: str) -> Iterator[str]:
    """Yield a move.

    If it has one or two digits, such as a board position, yield it with all other digits too.
    """
    yield move
    pieces = re.split(r"(\d)", move)
    if len(pieces) in (3, 5):
        for digits in itertools.product(_DIGITS, repeat=len(pieces) // 2):
            yield "".join(
                piece + digit for piece, digit in itertools.zip_longest(pieces[::2], digits, fillvalue="")
            )
