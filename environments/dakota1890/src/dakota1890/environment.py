"""`load_environment` as Buckeye calls it: the Dakota tasks behind Buckeye's environment protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, overload

from buckeye.envs.base import Message, Outcome, Probe, Reply, Task
from buckeye.envs.single_turn import SingleTurnEnvironment
from buckeye.errors import UsageError
from dakota1890.arguments import NUM_TRAIN, Arguments, check_tool_arguments, checked_arguments
from dakota1890.audit import GradeMismatchError, check_reward
from dakota1890.corpus import load_corpus
from dakota1890.errors import ArgumentError
from dakota1890.grading import grade
from dakota1890.probes import probes
from dakota1890.splits import AXES
from dakota1890.tasks import Item, TrainTasks, eval_tasks, train_cells, trained_families

T = TypeVar("T")


class DakotaEnvironment(SingleTurnEnvironment):
    """The splits `train`, `eval` (everything held out) and one for each held-out axis.

    There is no `train` where the families have train questions at none of the depths.
    Raises ArgumentError if they have no questions at all.
    """

    def __init__(self, arguments: Arguments) -> None:
        options = arguments.options
        self._arguments = arguments
        self._held_out = eval_tasks(options.families, options.depths, options.hint)
        train: dict[str, Sequence[Task]] = {}
        if trained_families(options) or not self._held_out:
            train["train"] = Mapped(TrainTasks(options, arguments.num_train), as_task)
        held_out = tuple(map(as_task, self._held_out))
        axes = {axis: tuple(t for t in held_out if t.data["split"] == axis) for axis in AXES}
        super().__init__(
            "dakota1890",
            {
                **train,
                "eval": held_out[: arguments.num_eval],
                **{axis: tasks for axis, tasks in axes.items() if tasks},
            },
        )

    @property
    def content_hash(self) -> str:
        """SHA-256 over the packaged data."""
        return load_corpus().content_hash

    def lexicon(self) -> Sequence[str]:
        """Every word of the record, for policies that answer at random."""
        return sorted(load_corpus().words)

    def probes(self) -> Sequence[Probe]:
        """Replies to held-out tasks whose reward is known."""
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

    def curriculum(self) -> Mapping[str, Sequence[Task]]:
        """The train tasks by family and depth."""
        cells = train_cells(self._arguments.options, self._arguments.num_train)
        return {name: Mapped(items, as_task) for name, items in cells.items()}

    def grade(self, task: Task, reply: Reply) -> Outcome:
        """Grade a reply. A grade that the second grader does not confirm is an error, not a reward."""
        shaping = self._arguments.shaping and task.data["split"] == "train"
        result = grade(reply.text, task.data, shaping=shaping, truncated=reply.finish_reason == "length")
        try:
            check_reward(result.reward, reply.text, task.data, shaping=shaping)
        except GradeMismatchError as mismatch:
            return Outcome(reward=None, error=str(mismatch), stop_reason="grade mismatch")
        stop_reason = result.tier if result.tier in ("truncated", "format") else "answered"
        return Outcome(reward=result.reward, components=result.components, stop_reason=stop_reason)

    def demonstrations(self, split: str = "train") -> Sequence[Sequence[Message]]:
        """The train tasks with their preferred answer, to imitate. Raises UsageError for another split, and
        where there are no train tasks."""
        if split != "train":
            raise UsageError(f"demonstrations come from the train split only; {split!r} must stay unseen")
        if split not in self.splits:
            options = self._arguments.options
            raise UsageError(
                f"dakota1890: there is nothing to imitate: {', '.join(options.families)} at depth "
                f"{', '.join(map(str, options.depths))} is only evaluated. Choose other families or depths."
            )
        return Mapped(super().tasks(split), _demonstration)


@dataclass(frozen=True, slots=True)
class Mapped(Sequence[T]):
    """A lazy view of a sequence through a function."""

    items: Sequence
    function: Callable[..., T]

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self.function(item) for item in self.items[index]]
        return self.function(self.items[index])


def as_task(item: Item) -> Task:
    """A task as Buckeye knows it."""
    return Task(id=item.id, messages=({"role": "user", "content": item.prompt},), data=item.data)


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
    tools: bool = False,
    max_calls: int = 4,
) -> DakotaEnvironment:
    """The Dakota environment.

    families: any of the twelve; None means all.
    depths: any of 1 to 4, in training and evaluation; None means all. Where nothing of the families and
        depths is trained, there is no split `train`.
    hints: "rule" states the rule each question tests in one sentence, "none" does not.
    invented: let invented words be `invented_fraction` of the train questions in the families that have them;
        the evaluation never has any.
    seed: the train sequence; the splits and the evaluation do not depend on it.
    num_train, num_eval: how many tasks; None takes every held-out question.
    shaping: pay near misses up to 0.2 in training. The evaluation never pays them.
    tools: let the policy look words and rules up, with at most `max_calls` calls; prompts then leave to the
        tools what these tell, the rule included.

    Raises UsageError for an argument outside these.
    """
    try:
        check_tool_arguments(tools=tools, max_calls=max_calls)
        arguments = checked_arguments(
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
        if not tools:
            return DakotaEnvironment(arguments)
        from dakota1890.tool_environment import DakotaToolEnvironment  # which builds on this module

        return DakotaToolEnvironment(arguments, max_calls=max_calls)
    except ArgumentError as error:
        raise UsageError(str(error)) from None
