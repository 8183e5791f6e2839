"""The Dakota tasks for the v1 API of `verifiers` (0.4): a taskset whose tasks grade themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf

from dakota1890.arguments import NUM_TRAIN, check_arguments
from dakota1890.grading import Grade, grade
from dakota1890.rows import from_info, split_items, to_info
from dakota1890.tasks import Item


class DakotaData(vf.TaskData):
    """Row with the prompt, the preferred answer, and in `info` all data for grading."""

    answer: str
    info: dict[str, Any]


class DakotaTaskConfig(vf.TaskConfig):
    """Settings of grading."""

    shaping: bool = True
    """Reward near misses up to 0.2, on train tasks only."""


class DakotaTask(vf.Task[DakotaData, vf.State, DakotaTaskConfig]):
    """Task that grades its own trace."""

    @vf.reward
    async def grade(self, trace: vf.Trace) -> float:
        """Return the reward of the last reply."""
        return self._graded(trace).reward

    @vf.metric
    async def components(self, trace: vf.Trace) -> dict[str, float]:
        """Return logged components that are not rewarded: exact, ortho_miss, sim, format_ok, truncated."""
        return dict(self._graded(trace).components)

    def _graded(self, trace: vf.Trace) -> Grade:
        _, data = from_info(self.data.info)
        return grade(trace.last_reply, data, shaping=self.config.shaping, truncated=trace.is_truncated)


class DakotaConfig(vf.TasksetConfig):
    """Selection of tasks; names and meanings are those of `dakota1890.environment.load_environment`."""

    task: DakotaTaskConfig = DakotaTaskConfig()
    split: str = "train"
    """train, eval (all held-out tasks), or a held-out axis: random, lemma, cell, rule, range, exception."""
    families: list[str] | None = None
    depths: list[int] | None = None
    hints: Literal["rule", "none"] = "rule"
    invented: bool = False
    invented_fraction: float = 0.5
    seed: int = 0
    num_train: int = NUM_TRAIN
    num_eval: int | None = None


_ARGUMENTS = ("families", "depths", "hints", "invented", "invented_fraction", "seed", "num_train", "num_eval")


class DakotaTaskset(vf.Taskset[DakotaTask, DakotaConfig]):
    """Tasks of one split, made one at a time."""

    def load(self) -> Iterator[DakotaTask]:
        """Yield the tasks.

        Raises ArgumentError for an invalid configuration, and for the train split of families and depths that
        are only evaluated.
        """
        config = self.config
        chosen = {name: getattr(config, name) for name in _ARGUMENTS}
        arguments = check_arguments(shaping=config.task.shaping, **chosen)
        for item in split_items(arguments, config.split):
            yield DakotaTask(to_data(item), config.task)


def to_data(item: Item) -> DakotaData:
    """Return an item as a row."""
    return DakotaData(id=item.id, prompt=item.prompt, answer=item.data["accept"][0], info=to_info(item))
