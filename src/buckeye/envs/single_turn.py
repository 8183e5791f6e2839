"""Base classes of environments with given tasks, and with one reply per rollout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from buckeye.envs.base import Outcome, Policy, Reply, Task


class FixedTasks:
    """Environment whose tasks are given by split."""

    def __init__(self, name: str, splits: Mapping[str, Sequence[Task]]) -> None:
        self.name = name
        self._splits = splits

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self._splits)

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split. Raise `KeyError` with the names of all splits for an unknown split."""
        if split not in self._splits:
            raise KeyError(f"{self.name} has no split {split!r}; it has {', '.join(self._splits)}")
        return self._splits[split]


class SingleTurnEnvironment(FixedTasks, ABC):
    """Environment that calls the policy once per rollout. Subclasses implement `grade` for the reply."""

    @abstractmethod
    def grade(self, task: Task, reply: Reply) -> Outcome:
        """Return the outcome for a reply. An implementation must be deterministic, and must keep no state."""

    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        """Call the policy once and grade its reply."""
        reply = await policy.chat(task.messages)
        return self.grade(task, reply)
