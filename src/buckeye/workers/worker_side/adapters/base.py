"""Interface of all adapters, and constructors of outcomes."""

from __future__ import annotations

import difflib
import os
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from ..outcomes import frames_of

Json = dict[str, Any]
"""A JSON object."""

Boundary = Literal["load", "reset", "step", "model", "score", "agent", "task", "config"]
"""Part that failed: loading, setup, a step, the model, scoring, the agent's program, the task, or the
configuration of the environment.
"""

_ABANDONED_AFTER = 4  # times the deadline of a rollout, to allow for retries


class AdapterError(Exception):
    """An error that the user must fix. The message has the problem and the fix."""


@contextmanager
def errors_as(problem: str) -> Iterator[None]:
    """Raise AdapterError with `problem` and the error, for any other error in the block."""
    try:
        yield
    except AdapterError:
        raise
    except Exception as error:
        raise AdapterError(f"{problem}: {type(error).__name__}: {error}") from error


class Adapter(Protocol):
    """One loaded environment."""

    note: str | None = None
    """Warning about the tasks that `tasks` returned last."""

    def info(self) -> Json:
        """Return the `name`, the `splits`, and optionally three other values.

        `group_rewards` is True if rewards depend on the whole group. `turns` is the maximum of a rollout.
        `judged` names the components that a judge model gives.
        """
        ...

    def tasks(self, split: str) -> Iterable[Json]:
        """Return the tasks (`id`, `messages`, `data`) in a fixed order.

        Raises KeyError for an unknown split.
        """
        ...

    async def rollout(self, task: Json, endpoint: Json, context: Json) -> Json:
        """Run a task's rollout on a model endpoint, and return an outcome made by `scored` or `failed`.

        If the context has `keep_for_group`, the outcome may have a `handle` for `score_group` instead of a
        reward.
        """
        ...

    async def score_group(self, task: Json, handles: Sequence[str]) -> list[Json]:
        """Return the outcomes of rollouts that were kept for group scoring."""
        raise AdapterError("this environment does not score groups")

    async def close(self) -> None:
        """Release the environment's resources."""
        return


class KeptRollouts:
    """Rollouts that wait for the rest of their group. Those of cancelled groups are forgotten."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, Any]] = {}

    def keep(self, rollout: Any, context: Json, *, stop_reason: str) -> Json:
        """Keep a rollout, and return its outcome, which has a handle instead of a reward."""
        oldest = time.monotonic() - _ABANDONED_AFTER * context["deadline"]
        for handle in [name for name, (ended, _) in self._kept.items() if ended < oldest]:
            del self._kept[handle]
        self._kept[context["rollout"]] = time.monotonic(), rollout
        return {"handle": context["rollout"], "stop_reason": stop_reason}

    def take(self, handles: Sequence[str]) -> list[Any]:
        """Return the rollouts of a group, and forget them. Raises TimeoutError if one is forgotten."""
        if expired := sum(handle not in self._kept for handle in handles):
            raise TimeoutError(
                f"{expired} of {len(handles)} rollouts of the group ended more than {_ABANDONED_AFTER} times "
                "the rollout timeout before the last one"
            )
        return [self._kept.pop(handle)[1] for handle in handles]


class SeededAdapter(Adapter):
    """Adapter whose tasks are seeds. The eval seeds follow the train seeds."""

    def __init__(self, name: str, args: Json) -> None:
        first, train, held_out = (
            int(args.get(argument, default))
            for argument, default in (("seed", 0), ("num_tasks", 1000), ("num_eval", 100))
        )
        self.name, self.first_seed = name, first
        self._seeds = {
            "train": range(first, first + train),
            "eval": range(first + train, first + train + held_out),
        }

    def info(self) -> Json:
        return {"name": self.name, "splits": list(self._seeds)}

    def tasks(self, split: str) -> Iterator[Json]:
        return (
            {
                "id": f"seed-{seed}",
                "messages": self.task_messages(seed),
                "data": {"seed": seed, "start": f"seed {seed}"},
            }
            for seed in self._seeds[split]
        )

    @abstractmethod
    def task_messages(self, seed: int) -> list[Json]:
        """Return the first messages of the task with this seed."""


def scored(reward: float, *, components: Mapping[str, float], stop_reason: str) -> Json:
    """Return the outcome of a rollout with a reward. `components` are logged and do not affect it."""
    return {"reward": reward, "components": components, "stop_reason": stop_reason, "error": None}


def failed(boundary: Boundary, kind: str, message: str, trace: Sequence[str] = ()) -> Json:
    """Return the outcome of a failed rollout, without a reward.

    `kind` is the class name of the error, and `trace` has its stack frames.
    """
    error = {"boundary": boundary, "type": kind, "message": message, "trace": list(trace)}
    return {"reward": None, "stop_reason": "error", "error": error}


def raised(boundary: Boundary, error: BaseException) -> Json:
    """Return the outcome of a rollout in which `error` was raised, including its causes."""
    kind, messages, trace = type(error).__name__, [str(error)], frames_of(error)
    boundary = "score" if kind == "OutcomeError" else boundary
    while (cause := error.__cause__) is not None and len(messages) < 4:
        error = cause
        messages.append(f"{type(error).__name__}: {error}")
        trace = frames_of(error) or trace
    return failed(boundary, kind, " <- ".join(filter(None, messages)), [] if boundary == "model" else trace)


def check_arguments(env_id: str, args: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise AdapterError for an unknown argument, with a suggestion."""
    known = sorted(names)
    for name in args:
        if name not in known:
            accepted = ", ".join(known) or "none"
            raise AdapterError(
                f"{env_id} has no argument {name!r}.{suggest_name(name, known)} Arguments: {accepted}"
            )


def trained_seat(env_id: str, seats: Sequence[str], args: Mapping[str, Any], opponents: Sequence[str]) -> int:
    """Return the index of the trained player.

    The argument `seat` is the number or name of this player. The argument `opponent` selects the policy of
    the other players. Raises AdapterError if an argument is missing or invalid, or is set for a single-player
    game.
    """
    seat, opponent = args.get("seat"), args.get("opponent")
    if len(seats) == 1:
        if seat not in (None, 0) or opponent is not None:
            raise AdapterError(f"{env_id} has one player: remove `seat` and `opponent`")
        return 0
    choices = " or ".join(f'"{name}"' for name in opponents)
    numbers = {name: number for number, name in enumerate(seats)}
    number = numbers.get(seat) if isinstance(seat, str) else seat
    is_seat = isinstance(number, int) and not isinstance(number, bool) and 0 <= number < len(seats)
    if not is_seat or opponent is None:
        missing = "" if is_seat or seat is None else f" It has no seat {seat!r}."
        known = ", ".join(f"{number} ({name})" for name, number in numbers.items())
        raise AdapterError(
            f"{env_id} has {len(seats)} players, and one is trained.{missing} Set `seat` to one of "
            f"{known}, and `opponent` to {choices} for the others"
        )
    if opponent not in opponents:
        suggestion = suggest_name(str(opponent), opponents)
        raise AdapterError(f"{env_id} has no opponent {opponent!r}.{suggestion} Set `opponent` to {choices}")
    return int(number or 0)


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return a suggestion sentence with a leading space, or "" if no known name is close."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


def first_messages(system: str | None, prompt: str | list[Json] | None) -> list[Json]:
    """Return the first messages of a conversation; `prompt` is the user's text, or messages."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, *([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or [])]


def existing_file(path: Any, argument: str) -> Path:
    """Return the absolute path of an argument's file. Raises AdapterError if the file does not exist."""
    if not isinstance(path, str):
        raise AdapterError(f"{argument} must be the path of a file, not {path!r}")
    absolute = Path(os.path.expanduser(path)).resolve()
    if not absolute.is_file():
        raise AdapterError(f"{argument} = {path!r}: the file {absolute} does not exist")
    return absolute
