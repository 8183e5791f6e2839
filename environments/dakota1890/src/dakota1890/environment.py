"""`load_environment` for Buckeye: the Dakota tasks behind its environment protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from buckeye.envs.base import Message, Outcome, Probe, Reply, Task
from buckeye.envs.single_turn import SingleTurnEnvironment
from buckeye.errors import UsageError
from dakota1890.arguments import NUM_TRAIN, Arguments, check_arguments
from dakota1890.corpus import load_corpus
from dakota1890.errors import ArgumentError
from dakota1890.grading import grade
from dakota1890.lazy import LazySequence, T
from dakota1890.probes import probes
from dakota1890.rows import split_items
from dakota1890.splits import AXES
from dakota1890.tasks import Item, eval_tasks, trained_families


class DakotaEnvironment(SingleTurnEnvironment):
    """Environment with the splits `train`, `eval` (all held-out tasks) and one per held-out axis.

    The split `train` is missing if the families have train questions at none of the depths. Raises
    ArgumentError if they have no questions at all.
    """

    def __init__(self, arguments: Arguments) -> None:
        options = arguments.options
        self._arguments = arguments
        self._held_out = eval_tasks(options.families, options.depths, options.hint)
        names = ["eval", *AXES]
        if trained_families(options) or not self._held_out:
            names.insert(0, "train")
        splits = {name: _map_lazily(split_items(arguments, name), as_task) for name in names}
        super().__init__("dakota1890", {name: s for name, s in splits.items() if len(s) or name == "eval"})

    @property
    def content_hash(self) -> str:
        """SHA-256 over the packaged data."""
        return load_corpus().content_hash

    def lexicon(self) -> Sequence[str]:
        """Return every word of the record, for policies that answer at random."""
        return sorted(load_corpus().words)

    def probes(self) -> Sequence[Probe]:
        """Return replies to held-out tasks whose reward is known."""
        return [
            Probe(
                name=f"{item.data['family']}: {name}",
                task=as_task(item),
                reply=reply,
                low=reward,
                high=reward,
            )
            for name, item, reply, reward in probes(self._held_out)
        ]

    def grade(self, task: Task, reply: Reply) -> Outcome:
        """Grade a reply."""
        truncated = reply.finish_reason == "length"
        result = grade(reply.text, task.data, shaping=self._arguments.shaping, truncated=truncated)
        stop_reason = result.tier if result.tier in ("truncated", "format") else "answered"
        return Outcome(reward=result.reward, components=result.components, stop_reason=stop_reason)

    def demonstrations(self, split: str = "train") -> Sequence[Sequence[Message]]:
        """Return the train tasks with their preferred answer, to imitate.

        Raises UsageError for another split, and without train tasks.
        """
        if split != "train":
            raise UsageError(
                f"dakota1890: no demonstrations of split {split!r}: held-out tasks must stay unseen",
                code="BK-ENV-ARGUMENT",
                hint="use the split `train`",
            )
        if split not in self.splits:
            options = self._arguments.options
            raise UsageError(
                f"dakota1890: no demonstrations: {', '.join(options.families)} at depth "
                f"{', '.join(map(str, options.depths))} has no train questions",
                code="BK-ENV-TASKS",
                hint="choose other families or depths",
            )
        return _map_lazily(super().tasks(split), _demonstration)


def as_task(item: Item) -> Task:
    """Return an item as a task of Buckeye."""
    return Task(id=item.id, messages=({"role": "user", "content": item.prompt},), data=item.data)


def _map_lazily(items: Sequence[Any], function: Callable[[Any], T]) -> Sequence[T]:
    return LazySequence(len(items), lambda index: function(items[index]))


def _demonstration(task: Task) -> list[Message]:
    answer = {"role": "assistant", "content": f"<answer>{task.data['accept'][0]}</answer>"}
    return [*task.messages, answer]


def load_environment(
    *,
    families: Sequence[str] | None = None,
    depths: Sequence[int] | None = None,
    hints: Literal["rule", "none"] = "rule",
    invented: bool = False,
    invented_fraction: float = 0.5,
    seed: int = 0,
    num_train: int = NUM_TRAIN,
    num_eval: int | None = None,
    shaping: bool = True,
) -> DakotaEnvironment:
    """Return the Dakota environment.

    Raises UsageError for an invalid argument.

        families: names of families; None means all.
        depths: any of 1 to 4, in training and evaluation; None means all. If no train questions remain, the
            split `train` is missing.
        hints: "rule" adds one sentence with the rule that each question tests, "none" does not.
        invented: let invented words be `invented_fraction` of the train questions in the families that have
            them; the evaluation never has any.
        seed: seed of the train sequence; the splits and the evaluation do not depend on it.
        num_train, num_eval: number of tasks; None takes every held-out question.
        shaping: reward near misses up to 0.2 in training. The evaluation never rewards them.
    """
    try:
        arguments = check_arguments(
            families=families,
            depths=depths,
            hints=hints,
            invented=invented,
            invented_fraction=invented_fraction,
            seed=seed,
            num_train=num_train,
            num_eval=num_eval,
            shaping=shaping,
        )
        return DakotaEnvironment(arguments)
    except ArgumentError as error:
        raise UsageError(error.message, code="BK-ENV-ARGUMENT", hint=error.hint or None) from None
