"""The simplest environment: one question, one reply, one grade."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from buckeye.envs.base import Outcome, Policy, Reply, Task


class SingleTurnEnvironment(ABC):
    """Asks each task once and grades the reply. Subclasses say how in `grade`."""

    def __init__(self, name: str, splits: Mapping[str, Sequence[Task]]) -> None:
        self.name = name
        self._splits = splits

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return tuple(self._splits)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split. Raises KeyError naming the splits there are."""
        if split not in self._splits:
            raise KeyError(f"{self.name} has no split {split!r}; it has {', '.join(self._splits)}")
        return self._splits[split]

    @abstractmethod
    def grade(self, task: Task, reply: Reply) -> Outcome:
        """What a finished reply is worth. Must be deterministic and keep no state."""

    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        """Ask once and grade."""
        reply = await policy.chat(task.messages)
        return self.grade(task, reply)
