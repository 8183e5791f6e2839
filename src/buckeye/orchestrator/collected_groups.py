"""Groups that were collected for one batch or dropped, and counts of all their rollouts."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from buckeye.monitor.log import SUCCESS
from buckeye.monitor.verdicts import rollouts_log_level
from buckeye.orchestrator.rollout import Group, Rollout

LOST = ("stale", "errored")
"""Reasons to drop a group that count as a loss. All other reasons are filters from the configuration."""
MOST_LOST = 0.05
"""Maximum share of lost groups. Above it, the log line is a warning."""


@dataclass(slots=True)
class CollectedGroups:
    """Groups of one batch, and the groups that were dropped while it was collected, each with its reason.

    `sampled_rewards` has the rewards of both, so that a filter does not bias the reported reward. It excludes
    stale groups, because their tasks run again and would count twice. `waited_seconds` is the time that the
    collector waited for new weights.
    """

    groups: list[Group]
    dropped_groups: list[tuple[str, Group]] = field(default_factory=list)
    sampled_rewards: list[float] = field(default_factory=list)
    waited_seconds: float = 0.0
    size: int = field(default=0, init=False)
    """Number of rollouts in the groups of the batch."""
    trained_tokens: int = field(default=0, init=False)
    """Number of sampled tokens in the scored rollouts of the batch."""

    def add(self, group: Group, reason: str | None) -> None:
        """Add a group to the batch; with a `reason`, add it to the dropped groups instead."""
        if reason != "stale":
            self.sampled_rewards += group.rewards
        if reason is None:
            self.groups.append(group)
            self.size += len(group.rollouts)
            self.trained_tokens += group.trained_tokens
        else:
            self.dropped_groups.append((reason, group))

    @property
    def all_groups(self) -> list[Group]:
        """Groups of the batch and dropped groups."""
        return [*self.groups, *(group for _, group in self.dropped_groups)]

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, including errored rollouts and those of dropped groups, without retried attempts."""
        return [rollout for group in self.all_groups for rollout in group.rollouts]

    @property
    def errors(self) -> list[str]:
        """Errors of all rollouts, except those of stale groups."""
        kept = [*self.groups, *(group for reason, group in self.dropped_groups if reason != "stale")]
        return [error for group in kept for error in group.errors]

    @property
    def dropped(self) -> Counter[str]:
        """Number of dropped groups by reason."""
        return Counter(reason for reason, _ in self.dropped_groups)

    @property
    def lost(self) -> list[Group]:
        """Groups that were dropped as stale or errored."""
        return [group for reason, group in self.dropped_groups if reason in LOST]

    @property
    def loses_too_much(self) -> bool:
        """True if the share of lost groups is above `MOST_LOST`."""
        return len(self.lost) > MOST_LOST * len(self.all_groups)

    def level(self) -> tuple[int, str]:
        """Return the level of the log line of the batch, and a text to append, which is empty for SUCCESS.

        The text has the numbers of errored and truncated rollouts.
        """
        rollouts = self.rollouts
        errored = sum(rollout.reward is None for rollout in rollouts)
        truncated = sum(rollout.truncated for rollout in rollouts if rollout.reward is not None)
        level = rollouts_log_level(len(rollouts), errored=errored, truncated=truncated)
        if level == SUCCESS:
            return level, ""
        counts = {"Errored": (errored, len(rollouts)), "Truncated": (truncated, len(rollouts) - errored)}
        return level, "".join(f" | {name}: {bad} of {total}" for name, (bad, total) in counts.items() if bad)

    def account(self) -> dict[str, int]:
        """Return the counts of finished attempts: `played` = `trained` + `dropped` + `failed`.

        A rollout that was retried once has two attempts. `retried` counts the failed attempts that were
        retried. `cut` counts the attempts with a reward whose sampling was ended early.
        """
        trained, dropped = _scored(self.groups), _scored([group for _, group in self.dropped_groups])
        attempts = [attempt for group in self.all_groups for attempt in group.attempts]
        return {
            "played": len(attempts),
            "trained": len(trained),
            "dropped": len(dropped),
            "failed": sum(attempt.reward is None for attempt in attempts),
            "retried": sum(len(rollout.earlier_attempts) for rollout in self.rollouts),
            "cut": sum(attempt.cut for attempt in (*trained, *dropped)),
        }

    def environment_metrics(self) -> dict[str, float]:
        """Return the metrics `env/<name>/...` of each environment, over all attempts, also of dropped groups.

        `share` is the environment's share of the rollouts of the batch. The mean reward excludes stale
        groups, because their tasks run again in other groups.
        """
        in_batch = Counter(rollout.env_name for rollout in _scored(self.groups))
        stale = {id(group) for reason, group in self.dropped_groups if reason == "stale"}
        attempts, rewards = defaultdict[str, list[Rollout]](list), defaultdict[str, list[float]](list)
        for group in self.all_groups:
            for attempt in group.attempts:
                attempts[attempt.env_name].append(attempt)
                if attempt.reward is not None and id(group) not in stale:
                    rewards[attempt.env_name].append(attempt.reward)
        metrics: dict[str, float] = {}
        for name, ended in attempts.items():
            key, scored = f"env/{name}", [attempt for attempt in ended if attempt.reward is not None]
            errors = Counter(
                attempt.outcome.boundary or "step" for attempt in ended if attempt.reward is None
            )
            metrics[f"{key}/share"] = in_batch[name] / max(1, in_batch.total())
            metrics[f"{key}/errored"] = errors.total()
            metrics |= {f"{key}/errors/{boundary}": count for boundary, count in errors.items()}
            if rewards[name]:
                metrics[f"{key}/reward/played"] = statistics.fmean(rewards[name])
            if scored:
                metrics[f"{key}/turns/mean"] = statistics.fmean(a.turns for a in scored)
                metrics[f"{key}/completion_len/mean"] = statistics.fmean(a.completion_tokens for a in scored)
                metrics[f"{key}/seq_len/mean"] = statistics.fmean(a.total_tokens for a in scored)
        return metrics


def _scored(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.scored]
