"""Single-player games of the library `textarena`.

The first message is the game's prompt and every later one what the game has said since, so a conversation
only ever grows. A task is a seed. The game itself judges moves that are not allowed and ends the play. Its
reward is paid, cut to [0, 1]; `game_reward` is as the game gave it. A game that is not over when
the rollout comes to a limit is lost.
"""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, TypeVar

from .base import AdapterError, Json, check_arguments, failed, likely, raised, scored, single_group_only
from .model import ModelError, chat

PREFIX = "textarena/"
OWN_ARGUMENTS = ("num_tasks", "num_eval", "seed", "system_prompt")
SYSTEM_PROMPT = (
    "You play a game. Read its rules carefully. End every reply with your move, in square brackets and "
    "exactly in the form that the rules ask for, and use square brackets for nothing else."
)

Result = TypeVar("Result")


class TextArena:
    """One game. The eval seeds follow those of train."""

    def __init__(self, env_id: str, args: Json) -> None:
        self._game = env_id.removeprefix(PREFIX)
        self._library = importlib.import_module("textarena")
        registry = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
        if self._game not in registry:
            raise AdapterError(
                f"textarena has no game {self._game!r}.{likely(self._game, registry)} Its ids end in -v0 "
                "(or -v0-SIZE): "
                f"{', '.join(name for name in sorted(registry) if name.endswith('-v0'))}."
            )
        defaults = registry[self._game].kwargs
        check_arguments(env_id, args, {*defaults, *OWN_ARGUMENTS})
        self._settings = {name: value for name, value in args.items() if name not in OWN_ARGUMENTS}
        train, held_out = int(args.get("num_tasks", 1000)), int(args.get("num_eval", 100))
        first = int(args.get("seed", 0))
        self._seeds = {
            "train": range(first, first + train),
            "eval": range(first + train, first + train + held_out),
        }
        self._system = str(args.get("system_prompt", SYSTEM_PROMPT))
        try:
            _Play(self._library, self._game, self._settings, first)
        except Exception as error:
            raise AdapterError(
                f"{env_id} cannot be played by one player: {type(error).__name__}: {error}"
            ) from error

    def info(self) -> Json:
        return {
            "name": f"{PREFIX}{self._game}",
            "generation": "textarena",
            "versions": {"textarena": metadata.version("textarena")},
            "splits": list(self._seeds),
            "group_rewards": False,
        }

    def tasks(self, split: str) -> Iterator[Json]:
        return (self._task(seed) for seed in self._seeds[split])

    def _task(self, seed: int) -> Json:
        """A game with this seed; what it begins with is said in the messages."""
        opening = _Play(self._library, self._game, self._settings, seed).said()
        messages = [{"role": "system", "content": self._system}] if self._system else []
        messages.append({"role": "user", "content": opening})
        return {"id": f"seed-{seed}", "messages": messages, "data": {"seed": seed, "start": f"seed {seed}"}}

    async def rollout(self, task: Json, endpoint: Json, context: Json) -> Json:
        try:
            play = _Play(self._library, self._game, self._settings, task["data"]["seed"])
        except Exception as error:
            return raised("reset", error)
        play.said()
        messages: list[Json] = list(task["messages"])
        turns = 0
        while True:
            try:
                reply = await chat(endpoint, messages)
            except ModelError as error:
                return raised("model", error)
            if reply.no_room:
                break
            turns += 1
            try:
                over = play.step(reply.text)
            except Exception as error:
                return raised("step", error)
            if over:
                return play.outcome(turns)
            messages += [reply.message, {"role": "user", "content": play.said()}]
        return scored(0.0, components={"turns": turns}, stop_reason="truncated")

    async def score_group(self, task: Json, handles: Sequence[str]) -> list[Json]:
        raise single_group_only("textarena")

    async def close(self) -> None:
        return None


class _Play:
    """One game being played. Games draw from Python's shared random numbers, so each keeps its own state."""

    def __init__(self, library: Any, game: str, settings: Json, seed: int) -> None:
        self._random = random.Random(seed).getstate()
        self._env = self._with_own_numbers(lambda: library.make(env_id=game, **settings))
        self._action_type = library.ObservationType.PLAYER_ACTION
        self._with_own_numbers(lambda: self._env.reset(num_players=1, seed=seed))

    def _with_own_numbers(self, call: Callable[[], Result]) -> Result:
        outside = random.getstate()
        random.setstate(self._random)
        try:
            return call()
        finally:
            self._random = random.getstate()
            random.setstate(outside)

    def said(self) -> str:
        """What the game has said since it was last asked."""
        seen = self._env.state.get_current_player_observation()
        return "\n\n".join(str(text) for _, text, kind in seen if kind != self._action_type)

    def step(self, move: str) -> bool:
        """Make a move; whether the game is over."""
        done, _ = self._with_own_numbers(lambda: self._env.step(action=move))
        return bool(done)

    def outcome(self, turns: int) -> Json:
        """What the finished game paid."""
        rewards, infos = self._env.close()
        if not rewards or 0 not in rewards:
            return failed("score", "NoReward", "the game is over and gave no reward")
        try:
            paid = float(rewards[0])
        except (TypeError, ValueError):
            return failed("score", "NoNumber", f"the game gave {rewards[0]!r} as its reward")
        if not math.isfinite(paid):
            return failed("score", "NotFinite", f"the game gave {paid} as its reward")
        illegal = bool(infos.get(0, {}).get("invalid_move"))
        return scored(
            min(1.0, max(0.0, paid)),
            components={"game_reward": paid, "turns": turns, "illegal_move": float(illegal)},
            stop_reason="illegal_move" if illegal else "game_over",
        )
