"""Filters that drop groups of rollouts before training."""

from __future__ import annotations

from typing import Literal

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.orchestrator.advantages import group_has_spread
from buckeye.orchestrator.rollout import Group


def min_scored_rollouts(size: int, minimum: int | None) -> int:
    """Return the minimum number of scored rollouts of a group of `size`.

    The default of `minimum` is half of `size` (rounded up), but at least two.
    """
    return min(size, max(2, (size + 1) // 2)) if minimum is None else minimum


def drop_cause(group: Group, config: OrchestratorConfig) -> Literal["no_spread"] | None:
    """Return the reason to drop a scored group, or None to keep it.

    `no_spread` (only with `zero_spread = "drop"`): the shaped rewards give no advantage; see
    `group_has_spread`. This is dynamic sampling (Yu et al. 2025, DAPO, arXiv 2503.14476, eq. 11).
    """
    if config.zero_spread == "keep":
        return None
    scored = [rollout.as_scored() for rollout in group.scored]
    return None if group_has_spread(scored, config.advantage) else "no_spread"
