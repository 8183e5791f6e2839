"""`load_environment`: the Dakota tasks behind Buckeye's environment protocol."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Literal, overload

from buckeye.envs.base import Message, Outcome, Reply, Task
from buckeye.envs.single_turn import SingleTurnEnvironment
from buckeye.errors import UsageError
from dakota1890.audit import GradeMismatchError, check_reward
from dakota1890.grading import grade
from dakota1890.tasks import FAMILIES, TaskOptions, TrainTasks, eval_tasks

NUM_TRAIN = 100_000


class DakotaEnvironment(SingleTurnEnvironment):
    """The splits `train` and `eval` (held-out lemmas and numbers); built by `load_environment`."""

    def __init__(self, options: TaskOptions, *, num_train: int, num_eval: int | None, shaping: bool) -> None:
        self._train = TrainTasks(options, num_train)
        self._shaping = shaping
        held_out = eval_tasks(options.families, options.hint)[:num_eval]
        super().__init__("dakota1890", {"train": self._train, "eval": held_out})

    def grade(self, task: Task, reply: Reply) -> Outcome:
        """Grade a reply. A grade that the second grader does not confirm is an error, not a reward."""
        shaping = self._shaping and task.data["split"] == "train"
        result = grade(reply.text, task.data, shaping=shaping, truncated=reply.finish_reason == "length")
        try:
            check_reward(result.reward, reply.text, task.data, shaping=shaping)
        except GradeMismatchError as mismatch:
            return Outcome(reward=None, error=str(mismatch), stop_reason="grade mismatch")
        stop_reason = result.tier if result.tier in ("truncated", "format") else "answered"
        return Outcome(reward=result.reward, components=result.components, stop_reason=stop_reason)

    def demonstrations(self, split: str = "train") -> Sequence[Sequence[Message]]:
        """The train tasks with their preferred answer, to imitate. Raises UsageError for another split."""
        if split != "train":
            raise UsageError(f"demonstrations come from the train split only; {split!r} must stay unseen")
        return Demonstrations(self._train)


class Demonstrations(Sequence[Sequence[Message]]):
    """A lazy view of tasks: the messages of each and the assistant's `<answer>form</answer>`."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks

    def __len__(self) -> int:
        return len(self._tasks)

    @overload
    def __getitem__(self, index: int) -> Sequence[Message]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sequence[Message]]: ...
    def __getitem__(self, index: int | slice) -> Sequence[Message] | Sequence[Sequence[Message]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        task = self._tasks[index]
        answer = {"role": "assistant", "content": f"<answer>{task.data['accept'][0]}</answer>"}
        return [*task.messages, answer]


def load_environment(
    *,
    families: Sequence[str] | None = None,
    hints: Literal["rule", "none"] = "rule",
    invented: bool = False,
    invented_fraction: float = 0.5,
    seed: int = 0,
    num_train: int = NUM_TRAIN,
    num_eval: int | None = None,
    shaping: bool = True,
) -> DakotaEnvironment:
    """The Dakota environment.

    families: any of conjugate, possess, numerals, dictionary; None means all.
    hints: "rule" states the rule each question tests in one sentence, "none" does not.
    invented: let invented words be `invented_fraction` of the train questions on conjugation and possession;
        the evaluation never has any.
    seed: the train sequence; the split and the evaluation do not depend on it.
    num_train, num_eval: how many tasks; None takes every held-out fact.
    shaping: pay near misses up to 0.2 in training. The evaluation never pays them.

    Raises UsageError for an argument outside these.
    """
    if hints not in ("rule", "none"):
        raise UsageError(f'dakota1890: `hints` is "rule" or "none", not {hints!r}.')
    if not 0.0 <= invented_fraction <= 1.0:
        raise UsageError(f"dakota1890: `invented_fraction` is between 0 and 1, not {invented_fraction!r}.")
    if num_train < 1 or (num_eval is not None and num_eval < 1):
        raise UsageError("dakota1890: `num_train` and `num_eval` are at least 1.")
    options = TaskOptions(
        families=_checked_families(families),
        hint=hints == "rule",
        invented_fraction=invented_fraction if invented else 0.0,
        seed=seed,
    )
    return DakotaEnvironment(options, num_train=num_train, num_eval=num_eval, shaping=shaping)


def _checked_families(families: Sequence[str] | None) -> tuple[str, ...]:
    if families is None:
        return FAMILIES
    names = ", ".join(FAMILIES)
    if isinstance(families, str) or not families:
        raise UsageError(f"dakota1890: `families` is a list with at least one of {names}.")
    for family in families:
        if family not in FAMILIES:
            close = difflib.get_close_matches(str(family), FAMILIES, 1)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"dakota1890: unknown family {family!r}; there are {names}.{meant}")
    return tuple(families)
