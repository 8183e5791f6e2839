"""Says when batch after batch has nothing to learn from."""

from __future__ import annotations

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
        mean = statistics.fmean(reward for group in groups for reward in group.rewards)
        steps = f"{step - self._batches + 1} to {step}"
        return (
            f"Nothing to learn from in the batches of steps {steps}: all rollouts of a task got the "
            f"same reward (mean {mean:.4f}), so there is no advantage. {_advice(groups)}"
        )


def _advice(groups: Sequence[Group]) -> str:
    if all(max(group.rewards) <= 0.0 for group in groups):
        return "No task was solved: it needs easier ones, or fine-tuning first"
    if all(min(group.rewards) >= 1.0 for group in groups):
        return "Every task was solved: it needs harder ones, or the run is done"
    if 2 * sum(map(_alike, groups)) > len(groups):
        return (
            "The rollouts of a task are the same word for word: the policy has collapsed. Go back to a "
            "checkpoint from before with a lower trainer.optim.lr, or with trainer.loss.entropy_coef"
        )
    return "Choose tasks that are solved now and then, or raise rollouts_per_example"


def _alike(group: Group) -> bool:
    texts = [[tuple(segment.token_ids) for segment in rollout.segments] for rollout in group.scored]
    return all(text == texts[0] for text in texts)
