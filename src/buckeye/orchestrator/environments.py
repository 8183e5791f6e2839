"""The environments of a run, loaded and named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from buckeye.envs.base import Environment, Task
from buckeye.envs.registry import load_environment
from buckeye.errors import UsageError


class EnvironmentSettings(Protocol):
    """What every `[[env]]` table has."""

    @property
    def id(self) -> str: ...
    @property
    def args(self) -> Mapping[str, Any]: ...
    @property
    def name(self) -> str | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedEnvironment:
    """An environment of the run under its display name. `ratio` is its share of the groups, relatively."""

    name: str
    environment: Environment
    ratio: float = 1.0


def short_name(env_id: str) -> str:
    """How an environment is called unless it is given a name: `owner/name@version` is `name`."""
    return env_id.partition("@")[0].rpartition("/")[2].removesuffix(".py")


def load_environments(settings: Sequence[EnvironmentSettings]) -> list[NamedEnvironment]:
    """Load the environments of a configuration. Raises UsageError if two would have the same name."""
    named = [
        NamedEnvironment(
            name=s.name or short_name(s.id),
            environment=load_environment(s.id, **s.args),
            ratio=getattr(s, "ratio", 1.0),
        )
        for s in settings
    ]
    names = [env.name for env in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"two environments are called {twice[0]}: give each [[env]] a `name` of its own")
    return named


def tasks_of(env: NamedEnvironment, split: str) -> Sequence[Task]:
    """The tasks of a split. Raises UsageError if the environment has no such split, or nothing in it."""
    try:
        tasks = env.environment.tasks(split)
    except KeyError:
        raise UsageError(f"environment {env.name} has no split {split!r}") from None
    if not len(tasks):
        raise UsageError(f"environment {env.name} has no tasks in its split {split!r}")
    return tasks
