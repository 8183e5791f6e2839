"""Says when batch after batch has nothing to learn from."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from buckeye.config.rewards import AdvantageConfig
from buckeye.orchestrator.advantages import group_has_spread
from buckeye.orchestrator.rollout import Group

_TOLD_AFTER = (5, 50, 500)


class Standstill:
    """Watches for batches in a row whose groups all have no spread, and so no advantage."""

    def __init__(self, config: AdvantageConfig | None) -> None:
        self._config = config
        self._batches = 0

    def look(self, step: int, groups: Sequence[Group]) -> str | None:
        """What to tell the user after the batch of `step`; None as long as there is nothing to tell."""
        if any(group_has_spread([r.as_scored() for r in g.scored], self._config) for g in groups):
            self._batches = 0
            return None
        self._batches += 1
        if self._batches not in _TOLD_AFTER:
            return None
        rewards = [_rewards(group) for group in groups]
        mean = statistics.fmean(itertools.chain(*rewards))
        steps = f"{step - self._batches + 1} to {step}"
        return (
            f"Nothing to learn from in the batches of steps {steps}: no rollout of a task did better than "
            f"another (mean reward {mean:.4f}), so there is no advantage. {_advice(groups, rewards)}"
        )


def _rewards(group: Group) -> list[float]:
    """What advantages are made of."""
    return [rollout.as_scored().reward for rollout in group.scored]


def _advice(groups: Sequence[Group], rewards: Sequence[Sequence[float]]) -> str:
    if all(len(each) == 1 for each in rewards):
        return "A rollout without siblings has nothing to be compared with: raise rollouts_per_example"
    if all(max(each) <= 0.0 for each in rewards):
        return "No task was solved: it needs easier ones, or fine-tuning first"
    if all(min(each) >= 1.0 for each in rewards):
        return "Every task was solved: it needs harder ones, or the run is done"
    if 2 * sum(map(_alike, groups)) > len(groups):
        return (
            "The rollouts of a task are the same word for word: the policy has collapsed. Go back to a "
            "checkpoint from before with a lower trainer.optim.lr, or with trainer.loss.entropy_coef"
        )
    return "Choose tasks that are solved now and then, or raise rollouts_per_example"


def _alike(group: Group) -> bool:
    texts = [[tuple(segment.token_ids) for segment in rollout.segments] for rollout in group.scored]
    return len(texts) > 1 and all(text == texts[0] for text in texts)
