"""From tasks to batches of groups: what is in flight, what may start, what is used, what is dropped."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buckeye import beat
from buckeye.errors import FinalRunError, RunError
from buckeye.orchestrator.environment_metrics import EnvironmentTally
from buckeye.orchestrator.filters import GroupFilter, smallest_group
from buckeye.orchestrator.pauses import EnvironmentPauses
from buckeye.orchestrator.rollout import Group, Rollout, RolloutPlayer
from buckeye.orchestrator.task_sampler import TaskSampler
from buckeye.space import Patience

_LOOK_SECONDS = 1.0

_ADVICE = {
    "errored": "Most rollouts fail: `buckeye env check` plays the environment by itself",
    "stale": "Rollouts take longer than max_async_level steps of training: raise it",
    "off_policy": "The weights change faster than rollouts end: raise max_off_policy_steps",
    "too_easy": "The model solves nearly all of these tasks: it needs harder ones",
    "too_hard": "The model solves nearly none of these tasks: it needs easier ones, or fine-tuning first",
    "no_spread": "The rollouts of a task all get the same reward: raise rollouts_per_example or choose tasks "
    "that are solved now and then",
}
"""What to do about groups that are dropped, by reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectorSettings:
    """Groups of together at least `batch_size` rollouts make a batch: `group_size` of one task, unless its
    environment has its own number. The rest bounds age and waste.

    `min_group_size` (None: see `smallest_group`): a group with fewer rollouts that have a reward is dropped
    as errored, and its task comes again in the next epoch. Which rollouts fail is no accident (the long ones
    do), so what is left of a group that lost most of them is no fair comparison.
    `max_async_level`: batch N may hold tokens of policy versions >= N - max_async_level; 0 is synchronous.
    `max_off_policy_steps`: a group is dropped if the weights were updated more often than this since its
    first token was sampled.
    `max_steps`: no group is started for a batch that will not be trained.
    `weights_timeout`: seconds to wait for a new policy version when nothing else is going on. They do not
    pass while a process of the run in `output_dir` waits for disk space, or while there is a version that
    is `measuring()`: an evaluation, for which the engines keep it.
    `filter_group` says why a scored group is not worth training on.
    """

    output_dir: Path
    batch_size: int
    group_size: int
    min_group_size: int | None
    max_async_level: int
    max_off_policy_steps: int
    oversampling_factor: float
    max_empty_batches: int
    max_steps: int | None
    weights_timeout: float
    filter_group: GroupFilter
    measuring: Callable[[], int | None] = lambda: None
    lockstep: bool = False


@dataclass(slots=True)
class Collected:
    """The groups of one batch, and those that were dropped while gathering them, each with the reason.
    `played_rewards` are those of the dropped groups too, so that a filter does not flatter or hide the
    policy. With `all_solved` it is not full: every task is solved for good, and no later batch will be."""

    groups: list[Group]
    dropped_groups: list[tuple[str, Group]] = field(default_factory=list)
    errored_rollouts: int = 0
    last_error: str | None = None
    played_rewards: list[float] = field(default_factory=list)
    waited_seconds: float = 0.0
    all_solved: bool = False
    by_environment: EnvironmentTally = field(default_factory=EnvironmentTally)

    @property
    def size(self) -> int:
        """How many rollouts were played for its groups."""
        return sum(len(group.rollouts) for group in self.groups)

    @property
    def rollouts(self) -> list[Rollout]:
        """All that were played, those of the dropped groups and the errored ones too."""
        groups = [*self.groups, *(group for _, group in self.dropped_groups)]
        return [rollout for group in groups for rollout in group.rollouts]

    @property
    def dropped(self) -> Counter[str]:
        """How many groups were dropped, by reason."""
        return Counter(reason for reason, _ in self.dropped_groups)


class GroupCollector:
    """Keeps groups in flight and hands out batches of them.

    The rule of capacity (as in AReaL, Fu et al. 2025, eq. 3): with policy version v, groups may be started as
    long as all that are started and unused still fit into the batches up to v + max_async_level. So a group
    is bounded in age by construction; only stragglers that were overtaken can still turn out stale, and they
    are dropped, counted, and their tasks played again.
    """

    def __init__(
        self,
        sampler: TaskSampler,
        player: RolloutPlayer,
        settings: CollectorSettings,
        pauses: EnvironmentPauses,
        *,
        state: dict[str, Any],
    ) -> None:
        self._sampler = sampler
        self._player = player
        self._settings = settings
        self._pauses = pauses
        self._passed_over: Counter[str] = Counter()
        self._next_group = int(state.get("next_group", 0))
        self._again = deque(int(i) for i in state.get("pending", []))
        self._playing: dict[asyncio.Task[Group], int] = {}
        self._finished: list[Group] = []
        self._failure: BaseException | None = None  # a defect of ours: rollouts do not raise
        self._news = asyncio.Event()
        self.version = 0
        self.collected = Collected(groups=[])
        """What was gathered last, or is being gathered."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs: the next group, the groups that were started but not used, and what the
        sampler learned."""
        pending = [*self._again, *self._playing.values(), *(g.index for g in self._finished)]
        return {"next_group": self._next_group, "pending": sorted(pending), **self._sampler.state()}

    def set_version(self, version: int) -> None:
        """The engines now sample with policy `version`."""
        self.version = version
        self._news.set()

    def metrics(self) -> dict[str, float]:
        """Pauses, and how many groups of each environment were passed over because it was paused."""
        passed_over = {f"env/{name}/passed_over": n for name, n in self._passed_over.items()}
        return {**self._pauses.metrics(), **passed_over}

    @property
    def in_flight(self) -> int:
        """Groups being played."""
        return len(self._playing)

    @property
    def buffered(self) -> int:
        """Groups played and not used yet."""
        return len(self._finished)

    async def collect(self, step: int, on_wait: Callable[[int], None]) -> Collected:
        """Gather the batch of `step`. `on_wait(version)` is called when nothing goes on before that version.

        Groups that are dropped are replaced until the batch is full, or no task is left to play. Raises
        FinalRunError when `max_empty_batches` batches' worth of groups in a row was dropped, or every
        environment fails for too long; `collected` then has what was played.
        """
        settings, collected = self._settings, Collected(groups=[])
        self.collected = collected
        dropped_in_a_row = 0
        while True:
            if self._failure is not None:
                raise self._failure
            dropped_in_a_row = self._accept(step, collected, dropped_in_a_row)
            if collected.size >= settings.batch_size:
                return collected
            if dropped_in_a_row >= settings.max_empty_batches * settings.batch_size:
                raise FinalRunError(self._all_dropped_message(collected))
            self._pauses.check()
            held = self._start_groups(step, collected.size)
            if not self._playing and not self._finished and self._sampler.exhausted:
                collected.all_solved = True
                return collected
            if self._playing:
                paused = self._pauses.paused()
                left_out = f" ({', '.join(paused)}: paused)" if paused else ""
                beat.report(f"rollouts of batch {step}{left_out}", on="inference")
                await self._wait_for_news(None)
            elif held:
                beat.report(f"the end of the pause of {', '.join(sorted(held))}")
                await self._wait_a_moment(self._pauses.seconds_left())
            else:
                since = time.monotonic()
                await self._wait_for_weights(step - settings.max_async_level, on_wait)
                collected.waited_seconds += time.monotonic() - since

    async def _wait_for_weights(self, version: int, on_wait: Callable[[int], None]) -> None:
        measured = self._settings.measuring()
        if measured is not None:  # the engines keep it, however long that takes
            beat.report(f"rollouts of the evaluation of step {measured}", on="inference")
            await self._wait_a_moment(_LOOK_SECONDS)
            return
        on_wait(version)
        beat.report(f"weights {max(0, version)}", on="trainer")
        await self._wait_for_news(self._settings.weights_timeout)

    def _start_groups(self, step: int, accepted: int) -> Set[str]:
        """Start what there is room for; if only environments that are held back could fill it: those."""
        settings = self._settings
        last = self.version + settings.max_async_level
        if settings.max_steps is not None:
            last = min(last, settings.max_steps - 1)
        batches = last + 1 - step
        capacity = math.ceil(settings.oversampling_factor * settings.batch_size * batches)
        if settings.lockstep and self._playing:
            return frozenset()  # whole waves only, so that every run makes the same ones
        under_way = sum(map(self._size_of, self._playing.values())) + sum(
            len(g.rollouts) for g in self._finished
        )
        while accepted + under_way < capacity:
            held = self._pauses.held()
            index = self._next_index(held)
            if index is None:
                return held
            self._next_group = max(self._next_group, index + 1)
            size = self._size_of(index)
            playing = self._player.start_group(self._sampler[index], size)
            self._pauses.started(self._sampler.environment_of(index).name)
            self._playing[playing] = index
            playing.add_done_callback(self._finish)
            under_way += size
        return frozenset()

    def _next_index(self, held: Set[str]) -> int | None:
        """The next group of an environment that is not held back; None if there is none. Groups of those that
        are get passed over."""
        for index in self._again:
            if self._sampler.environment_of(index).name not in held:
                self._again.remove(index)
                return index
        if not self._sampler.has_tasks_beside(held):
            return None
        index = self._sampler.first_unsolved(self._next_group)
        while (name := self._sampler.environment_of(index).name) in held:
            self._passed_over[name] += 1
            index = self._sampler.first_unsolved(index + 1)
        return index

    def _size_of(self, index: int) -> int:
        """How many rollouts group `index` has."""
        return self._sampler.environment_of(index).play.group_size or self._settings.group_size

    def _finish(self, playing: asyncio.Task[Group]) -> None:
        del self._playing[playing]
        if not playing.cancelled():
            self._failure = self._failure or playing.exception()
            if playing.exception() is None:
                group = playing.result()
                self._pauses.ended(self._sampler.environment_of(group.index).name, group)
                self._finished.append(group)
        self._news.set()

    async def _wait_for_news(self, timeout: float | None) -> None:
        """Until a group ends (each rollout has its own deadline) or the policy version changes."""
        patience = Patience(timeout, self._settings.output_dir) if timeout is not None else None
        while not self._news.is_set():
            await self._news_within(min(_LOOK_SECONDS, timeout or _LOOK_SECONDS))
            if patience is not None and not self._news.is_set() and patience.is_over():
                raise RunError(
                    f"no weights newer than version {self.version} appeared within {timeout:g} s "
                    "(orchestrator.weights_timeout): is the trainer running?"
                )
        self._news.clear()

    async def _wait_a_moment(self, seconds: float) -> None:
        """Until something new, or for so long, but no longer than it takes to show that we are alive."""
        await self._news_within(min(_LOOK_SECONDS, seconds))
        self._news.clear()

    async def _news_within(self, seconds: float) -> None:
        """Not `wait_for`: until Python 3.12 that forgets a cancellation that comes with the news."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def _accept(self, step: int, collected: Collected, dropped_in_a_row: int) -> int:
        """Move finished groups into the batch; returns how many rollouts were dropped since the last accepted
        one."""
        if self._settings.lockstep:
            if self._playing:
                return dropped_in_a_row
            self._finished.sort(key=lambda g: g.index)
        while self._finished and collected.size < self._settings.batch_size:
            group = self._finished.pop(0)
            collected.by_environment.add(group)
            collected.errored_rollouts += len(group.errors)
            collected.last_error = group.errors[-1] if group.errors else collected.last_error
            collected.played_rewards += group.rewards
            reason = self._reason_to_drop(group, step)
            if reason in ("stale", "off_policy"):
                self._again.append(group.index)
            else:  # of a group that has errored, the rollouts that are left say nothing about the task
                self._sampler.settle(group.index, [] if reason == "errored" else group.rewards)
            if reason is None:
                collected.groups.append(group)
                dropped_in_a_row = 0
                continue
            collected.dropped_groups.append((reason, group))
            dropped_in_a_row += len(group.rollouts)
        return dropped_in_a_row

    def _reason_to_drop(self, group: Group, step: int) -> str | None:
        settings = self._settings
        if len(group.scored) < smallest_group(len(group.rollouts), settings.min_group_size):
            return "errored"
        oldest = group.oldest_version
        if oldest is not None and step - oldest > settings.max_async_level:
            return "stale"
        if oldest is not None and self.version - oldest > settings.max_off_policy_steps:
            return "off_policy"
        return settings.filter_group(group)

    def _all_dropped_message(self, collected: Collected) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in collected.dropped.most_common())
        advice = _ADVICE[collected.dropped.most_common(1)[0][0]]
        return (
            f"{self._settings.max_empty_batches} batches' worth of groups in a row gave nothing to train on "
            f"({reasons}; {collected.errored_rollouts} rollouts errored"
            + (f", the last with: {collected.last_error}" if collected.last_error else "")
            + f"). {advice}. Raise orchestrator.max_empty_batches to try for longer"
        )

    async def close(self) -> None:
        """Cancel what is in flight."""
        for playing in list(self._playing):
            playing.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
