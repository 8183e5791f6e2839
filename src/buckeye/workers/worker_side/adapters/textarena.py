"""Adapter for games of the library `textarena`: single-player games, and one seat of multi-player games.

A task is a seed. The first message of the game is its prompt, and every later message has the game's new
output. The library judges illegal moves and ends the game. The reward is the game's reward, clipped to the
range from 0 to 1. The component `game_reward` is not clipped. If the rollout reaches a limit before the game
is over, the reward is 0.

In a multi-player game, the argument `seat` selects the trained player. The argument `opponent` selects the
policy of all other players: "random" makes random legal moves, "self" calls the same model in separate
conversations, which are not trained on.
"""

from __future__ import annotations

import importlib

from .base import (
    AdapterError,
    Json,
    SeededAdapter,
    check_arguments,
    failed,
    first_messages,
    raised,
    scored,
    suggest_name,
    trained_seat,
)
from .model import ModelError, chat
from .textarena_game import TextArenaGame, fewest_players

PREFIX = "textarena/"
OWN_ARGUMENTS = ("num_tasks", "num_eval", "seed", "seat", "opponent", "system_prompt")
OPPONENTS = ("random", "self")
SYSTEM_PROMPT = (
    "You play a game. Read its rules carefully. End every reply with your move, in square brackets and "
    "exactly in the form that the rules ask for, and use square brackets for nothing else."
)


class TextArena(SeededAdapter):
    """One game."""

    def __init__(self, env_id: str, args: Json) -> None:
        super().__init__(env_id, args)
        self._game = env_id.removeprefix(PREFIX)
        self._library = importlib.import_module("textarena")
        registry = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
        if self._game not in registry:
            raise AdapterError(
                f"textarena has no game {self._game!r}.{suggest_name(self._game, registry)} Games (some also "
                f"as NAME-SIZE): {', '.join(name for name in sorted(registry) if name.endswith('-v0'))}"
            )
        defaults = registry[self._game].kwargs
        check_arguments(env_id, args, {*defaults, *OWN_ARGUMENTS})
        self._settings = {name: value for name, value in args.items() if name not in OWN_ARGUMENTS}
        self._system = str(args.get("system_prompt", SYSTEM_PROMPT))
        self._players = fewest_players(self._library, self._game, self._settings, self.first_seed)
        game = self._start_game(self.first_seed)
        self._seat = trained_seat(env_id, game.player_names, args, OPPONENTS)
        self._opponent = args.get("opponent")
        if self._opponent == "random":
            game.read_observation()
            if game.random_move() is None:
                raise AdapterError(
                    f'opponent = "random" is not supported for {env_id}: the texts of the game show no moves '
                    'in square brackets. Set opponent = "self"'
                )

    def _start_game(self, seed: int) -> TextArenaGame:
        return TextArenaGame(self._library, self._game, self._settings, seed, self._players)

    def task_messages(self, seed: int) -> list[Json]:
        """Return the instructions, and the game's opening."""
        return first_messages(self._system, self._start_game(seed).first_messages(self._seat))

    async def rollout(self, task: Json, endpoint: Json, context: Json) -> Json:
        try:
            game = self._start_game(task["data"]["seed"])
        except Exception as error:
            return raised("reset", error)
        conversations = [first_messages(self._system, None) for _ in game.player_names]
        turns = 0
        over = False
        while not over:
            player, trained = game.player, game.player == self._seat
            conversations[player].append({"role": "user", "content": game.read_observation()})
            try:
                if trained or self._opponent == "self":
                    reply = await chat(endpoint, conversations[player], trained=trained)
                    if reply.no_room and trained:
                        return scored(0.0, components={"turns": turns}, stop_reason="truncated")
                    if reply.no_room:
                        message = f"no room for a reply of {game.player_names[player]}: the context is full"
                        return failed("model", "NoRoom", message)
                    conversations[player].append(reply.message)
                    move = reply.text
                else:
                    move = _random_move(game)
                over = game.step(move)
            except ModelError as error:
                return raised("model", error)
            except Exception as error:
                return raised("step", error)
            turns += trained
        if not turns:
            message = f"the game ended before the first turn of {game.player_names[self._seat]}"
            return failed("step", "NoTurn", message)
        return game.outcome(self._seat, turns)


def _random_move(game: TextArenaGame) -> str:
    """Return a random legal move. Raises RuntimeError if the game's texts show none."""
    move = game.random_move()
    if move is None:
        raise RuntimeError(f"the texts of the game show no legal move for {game.player_names[game.player]}")
    return move
