"""Adapter for environments of `gymnasium` whose actions are discrete or texts.

A task is a seed. The first message has the environment's documentation, the names of the actions and the
first observation; each later message has the next observation. The action is the last name of an action in a
reply. A reply without one is not a step of the environment; its reward is the argument `invalid_reward`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .base import AdapterError, Json, SeededAdapter, errors_as, first_messages, suggest_name
from .episodes import Step, run_episode

PREFIX = "gymnasium/"
OWN_ARGUMENTS = ("num_tasks", "num_eval", "seed", "actions", "max_steps", "invalid_reward", "system_prompt")
_MAX_STEPS = 100
_MAX_CHARACTERS = 4000
"""Maximum length of an observation that the environment does not render as text."""
_SECTIONS = ("Description", "Rewards", "Reward", "Episode End")
_HIGHLIGHTED = re.compile(r"\x1b\[4\d(?:;\d+)*m(.*?)\x1b\[0m")
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_LINK = re.compile(r"\[?<a [^>]*>(.*?)</a>\]?")
_TAXI_PLACES = ("at R", "at G", "at Y", "at B", "in the taxi")


def _taxi(env: Any, observation: Any) -> str:
    _, _, passenger, goal = env.decode(observation)
    return f"The brackets mark the taxi. Passenger: {_TAXI_PLACES[passenger]}. Goal: {_TAXI_PLACES[goal]}."


_KNOWN: dict[str, tuple[str, Callable[[Any, Any], str]]] = {
    "FrozenLakeEnv": (
        "left down right up",
        lambda env, state: "The brackets mark you. F: frozen, H: hole, G: goal.",
    ),
    "CliffWalkingEnv": ("up right down left", lambda env, state: "x: you, C: cliff, T: goal."),
    "TaxiEnv": ("south north east west pickup dropoff", _taxi),
    "BlackjackEnv": (
        "stick hit",
        lambda env, cards: f"Your sum: {cards[0]}. Dealer: {cards[1]}. Usable ace: {bool(cards[2])}.",
    ),
}
"""Names of the actions, and a text about an observation, by the class of the environment."""


class Gymnasium(SeededAdapter):
    """One registered environment."""

    def __init__(self, env_id: str, args: Json) -> None:
        super().__init__(env_id, args)
        self._name = env_id.removeprefix(PREFIX)
        self._library = importlib.import_module("gymnasium")
        module, _, name = self._name.rpartition(":")
        if module:
            importlib.import_module(module)
        registry = self._library.registry
        if name not in registry:
            raise AdapterError(
                f"gymnasium has no environment {name!r}.{suggest_name(name, registry)} An environment of "
                "another package has the id gymnasium/MODULE:NAME, where MODULE registers NAME"
            )
        self._settings = {key: value for key, value in args.items() if key not in OWN_ARGUMENTS}
        self.max_steps = int(args.get("max_steps", registry[name].max_episode_steps or _MAX_STEPS))
        self.invalid_reward = float(args.get("invalid_reward", -1.0))
        self._mode: Json = {}
        self._system = ""
        self._about: Callable[[Any, Any], str] | None = None
        with errors_as(f"cannot make {env_id} with {self._settings}"):
            env, messages = self.reset(self.first_seed)
        if "ansi" in (env.metadata.get("render_modes") or ()):
            self._mode = {"render_mode": "ansi"}
        elif len(messages[-1]["content"]) > _MAX_CHARACTERS:
            raise AdapterError(
                f"{env_id}: its observations are too large for a text: {env.observation_space}"
            )
        names, self._about = _KNOWN.get(type(env.unwrapped).__name__, ("", None))
        self.actions = Actions(env_id, env.action_space, args.get("actions", names.split()))
        sections = [*_SECTIONS, *([] if names else ["Action Space", "Observation Space"])]
        prompt = str(args.get("system_prompt", _documentation(env.unwrapped, sections)))
        self._system = "\n\n".join(filter(None, [prompt, self.actions.form]))
        env.close()

    def _make(self) -> Any:
        settings = {"max_episode_steps": self.max_steps, "disable_env_checker": True, **self._mode}
        return self._library.make(self._name, **settings, **self._settings)

    def task_messages(self, seed: int) -> list[Json]:
        env, messages = self.reset(seed)
        env.close()
        return messages

    def reset(self, seed: int) -> tuple[Any, list[Json]]:
        """Return a new environment that starts with a seed, and the first messages."""
        env = self._make()
        observation, _ = env.reset(seed=seed)
        return env, first_messages(self._system, self.text(env, observation))

    def text(self, env: Any, observation: Any) -> str:
        """Return an observation as text: rendered by the environment, or else its values."""
        about = [self._about(env.unwrapped, observation)] if self._about else []
        if self._mode:
            rendered = _COLOR.sub("", _HIGHLIGHTED.sub(r"[\1]", str(env.render())))
            return "\n".join([rendered.strip("\n"), *about])
        return "\n".join(about) or _values(observation)

    async def rollout(self, task: Json, endpoint: Json, context: Json) -> Json:
        return await run_episode(GymnasiumEpisode(self, task["data"]["seed"]), endpoint)


class Actions:
    """Actions of an environment, with their names. Without names, an action is a text."""

    def __init__(self, env_id: str, space: Any, names: Sequence[str]) -> None:
        kind, self._folded = type(space).__name__, list[str]()
        if kind not in ("Discrete", "Text"):
            raise AdapterError(f"{env_id}: its actions are neither discrete nor texts: {space}")
        self.form = ""
        if kind == "Discrete":
            self._first = int(space.start)
            names = list(names or map(str, range(self._first, self._first + int(space.n))))
            if len(names) != space.n:
                raise AdapterError(f"{env_id}: `actions` must have {space.n} names, not {len(names)}")
            self._folded = [name.casefold() for name in names]
            longest_first = sorted(self._folded, key=len, reverse=True)
            self._pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")
            self.form = f"End every reply with one of these actions: {', '.join(names)}."

    def find(self, reply: str) -> Any:
        """Return the last action that a reply names, or the text. Returns None for no action."""
        if not self._folded:
            return reply
        found = self._pattern.findall(reply.casefold())
        return self._first + self._folded.index(found[-1]) if found else None


class GymnasiumEpisode:
    """Episode of an environment, from a seed."""

    def __init__(self, adapter: Gymnasium, seed: int) -> None:
        self._adapter, self._seed = adapter, seed
        self._env: Any = None
        self._turns = self._invalid = 0

    async def start(self) -> list[Json]:
        self._env, messages = self._adapter.reset(self._seed)
        return messages

    async def step(self, reply: str) -> Step:
        adapter, action = self._adapter, self._adapter.actions.find(reply)
        self._turns += 1
        stop_reason = "max_steps" if self._turns >= adapter.max_steps else ""
        if action is None:
            self._invalid += 1
            reward, text = adapter.invalid_reward, adapter.actions.form
        else:
            observation, reward, terminated, truncated, _ = self._env.step(action)
            text = adapter.text(self._env, observation)
            stop_reason = "done" if terminated else "max_steps" if truncated else stop_reason
        return Step(reward=reward, messages=[{"role": "user", "content": text}], stop_reason=stop_reason)

    def components(self) -> Mapping[str, float]:
        return {"invalid_actions": self._invalid}

    async def close(self) -> None:
        if self._env is not None:
            self._env.close()


def _documentation(env: Any, kept: Sequence[str]) -> str:
    """Return the sections of an environment's documentation that its player needs."""
    title, *sections = re.split(r"^[ ]*## +", inspect.getdoc(type(env)) or "", flags=re.MULTILINE)
    parts = [title, *(part for part in sections if part.partition("\n")[0].strip() in kept)]
    return _LINK.sub(r"\1", "\n\n".join(part.strip() for part in parts)).strip()


def _values(observation: Any) -> str:
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {_values(value)}" for name, value in observation.items())
    plain = observation.tolist() if hasattr(observation, "tolist") else observation
    if isinstance(plain, (list, tuple)):
        return f"[{', '.join(map(_values, plain))}]"
    return f"{plain:.4g}" if isinstance(plain, float) else str(plain)
