"""What was gathered for one batch: its groups, those that were dropped, and the account of all plays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from buckeye.monitor.log import SUCCESS
from buckeye.monitor.signals import rollouts_level
from buckeye.orchestrator.environment_account import EnvironmentTally
from buckeye.orchestrator.rollout import Group, Rollout

LOST = ("stale", "errored")
"""Why groups are dropped that nobody wants to be without: the other reasons are filters of the user's."""
MOST_LOST = 0.05
"""The share of the groups from which on that is a warning."""


@dataclass(slots=True)
class Collected:
    """The groups of one batch, and those that were dropped while gathering them, each with the reason.
    `played_rewards` are those of the dropped groups too, so that a filter does not flatter or hide the
    policy, but for the stale ones, whose tasks are played again: each draw of a task counts once."""

    groups: list[Group]
    dropped_groups: list[tuple[str, Group]] = field(default_factory=list)
    played_rewards: list[float] = field(default_factory=list)
    waited_seconds: float = 0.0
    by_environment: EnvironmentTally = field(default_factory=EnvironmentTally)

    def add(self, group: Group, reason: str | None) -> None:
        """A group of the batch, or one that is dropped for a reason."""
        self.by_environment.add(group, drawn=reason != "stale")
        if reason != "stale":
            self.played_rewards += group.rewards
        if reason is None:
            self.groups.append(group)
        else:
            self.dropped_groups.append((reason, group))

    @property
    def size(self) -> int:
        """How many rollouts were played for its groups."""
        return sum(len(group.rollouts) for group in self.groups)

    @property
    def all_groups(self) -> list[Group]:
        """The dropped ones too."""
        return [*self.groups, *(group for _, group in self.dropped_groups)]

    @property
    def rollouts(self) -> list[Rollout]:
        """All that were played, those of the dropped groups and the errored ones too; each once, however
        often it was tried."""
        return [rollout for group in self.all_groups for rollout in group.rollouts]

    @property
    def errors(self) -> list[str]:
        """Why rollouts have no reward, but for those of stale groups, which have nothing to lose."""
        kept = [*self.groups, *(group for reason, group in self.dropped_groups if reason != "stale")]
        return [error for group in kept for error in group.errors]

    @property
    def dropped(self) -> Counter[str]:
        """How many groups were dropped, by reason."""
        return Counter(reason for reason, _ in self.dropped_groups)

    @property
    def lost(self) -> list[Group]:
        """The groups that were dropped, and not by a filter."""
        return [group for reason, group in self.dropped_groups if reason in LOST]

    @property
    def loses_too_much(self) -> bool:
        """Whether more than a few of the groups were lost."""
        return len(self.lost) > MOST_LOST * len(self.all_groups)

    def level(self) -> tuple[int, str]:
        """Return the log level of what became of the rollouts, and their counts if it is not SUCCESS."""
        played = self.rollouts
        errored = sum(rollout.reward is None for rollout in played)
        truncated = sum(rollout.truncated for rollout in played if rollout.reward is not None)
        level = rollouts_level(len(played), errored=errored, truncated=truncated)
        if level == SUCCESS:
            return level, ""
        counts = {"Errored": (errored, len(played)), "Truncated": (truncated, len(played) - errored)}
        return level, "".join(f" | {name}: {bad} of {of}" for name, (bad, of) in counts.items() if bad)

    def account(self) -> dict[str, int]:
        """Every play that has ended, once: `played` = `trained` + `dropped` + `failed`. A rollout that was
        played again after a failure is two plays; `retried` of the failed ones were. Of the others `cut` had
        their sampling ended early."""
        trained, dropped = _scored(self.groups), _scored([group for _, group in self.dropped_groups])
        plays = [play for group in self.all_groups for play in group.plays]
        return {
            "played": len(plays),
            "trained": len(trained),
            "dropped": len(dropped),
            "failed": sum(play.reward is None for play in plays),
            "retried": sum(len(rollout.retried) for rollout in self.rollouts),
            "cut": sum(play.cut for play in (*trained, *dropped)),
        }


def _scored(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.scored]
