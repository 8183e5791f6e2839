"""Collection of batches: start groups up to a capacity, and choose finished groups for the next batch."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Hashable, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from buckeye.base import heartbeat
from buckeye.base.columns import counted, quoted
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.errors import FinalRunError, RunError
from buckeye.orchestrator.collected_groups import CollectedGroups
from buckeye.orchestrator.filters import drop_cause, min_scored_rollouts
from buckeye.orchestrator.pauses import EnvironmentPauses
from buckeye.orchestrator.rollout import Group, InFlightGroup, leaves_room
from buckeye.orchestrator.task_sampler import GroupTask, TaskSampler

log = logging.getLogger(__name__)

_Key = TypeVar("_Key", bound=Hashable)
_POLL_SECONDS = 1.0
_STARTS_AT_ONCE = 4  # groups: their first prompts are rendered in one iteration of the event loop

_ADVICE = {
    "errored": "run `buckeye env check RUN`",
    "stale": "raise max_off_policy_steps, or lower oversampling_factor: rollouts take too long",
    "too_easy": "use harder tasks: the model solves nearly all of these",
    "too_hard": "use easier tasks, or fine-tune first: the model solves nearly none of these",
    "no_spread": "raise rollouts_per_example, or use tasks that the model sometimes solves: "
    "rollouts of a task get equal rewards",
}
"""Hint of the error that all groups were dropped, by the most frequent reason to drop a group.

`RUN` is the directory of the run.
"""


@dataclass(frozen=True, slots=True)
class _FinishedGroup:
    """Finished group that waits for a batch.

    `oldest` is the oldest policy version that sampled one of its tokens; without tokens, the current version.
    `fault` is a reason other than its age to drop the group, or None. `amount` is in rollouts or tokens.
    """

    group: Group
    oldest: int
    fault: str | None
    amount: int
    is_scored: bool


class GroupRunner(Protocol):
    """Runner of groups, in this process or in others. `attempts` counts finished attempts."""

    attempts: int

    def start_group(self, group: GroupTask, size: int, flight: InFlightGroup) -> asyncio.Task[Group]:
        """Start `size` rollouts of one task."""
        ...


class GroupCollector:
    """Collector of batches. It keeps groups of rollouts running ("in flight") and chooses finished groups.

    A batch is full when its groups have at least `batch_size` rollouts, or `token_batch_size` sampled tokens
    in rollouts with a reward. A group has `rollouts_per_example` rollouts of one task, unless its environment
    sets another number.

    Amounts of groups are in rollouts, or else in tokens. A group in flight counts with the mean number of
    tokens of the rollouts of the last batch, so the number of groups in flight depends on no time. At the
    start of a run, it is the maximum length of a reply. A batch of enough tokens waits for groups in flight
    that would be too old for the next one, unless `oversampling_factor` is above 1.

    A group with fewer scored rollouts than `min_scored_rollouts` is dropped as errored. Its task is drawn
    again in the next epoch. Long rollouts fail more often, so the rollouts that remain would be a biased
    comparison.

    Capacity (as in AReaL, Fu et al. 2025, eq. 3): with policy version v, a group may start if all groups that
    are in flight, or finished and waiting, fit into the batches up to v + run_ahead.

    Order: the oldest groups come first. A younger group enters a batch only if all older groups, finished or
    in flight, still fit into later batches before their tokens are too old (`leaves_room`). So training gets
    long rollouts at the rate of their sampling, and no group becomes stale. But with an `oversampling_factor`
    above 1, more groups can be in flight than `max_token_age` batches hold. Then the groups that finish first
    are used. The other groups are cut and dropped as stale, and their tasks run again.

    `version_in_evaluation()` returns the version that the engines keep during an evaluation, or None. The
    time of an evaluation does not count toward `weights_timeout`.
    """

    def __init__(
        self,
        sampler: TaskSampler,
        runner: GroupRunner,
        config: OrchestratorConfig,
        pauses: EnvironmentPauses,
        *,
        state: dict[str, Any],
        deterministic: bool = False,
        version_in_evaluation: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._sampler = sampler
        self._runner = runner
        self._config = config
        self._pauses = pauses
        self._deterministic = deterministic
        self._version_in_evaluation = version_in_evaluation
        self._awaited: int | None = None  # weights version in the last log line about waiting
        self._passed_over: Counter[str] = Counter()
        self._next_group = int(state.get("next_group", 0))
        self._target = config.token_batch_size or config.batch_rollouts
        self._tokens_per_rollout = float(state.get("tokens_per_rollout", 0.0))
        self._pending = deque(int(i) for i in state.get("pending", []))
        self._in_flight: dict[asyncio.Task[Group], InFlightGroup] = {}
        # by first version (None: not begun) and size, so that no cost depends on the number of groups
        self._flying: Counter[tuple[int | None, int]] = Counter()
        self._finished: list[_FinishedGroup] = []  # in the order in which they may enter a batch
        self._buffered: Counter[int] = Counter()  # amounts of finished groups, by oldest version
        self._faulty = 0  # number of finished groups with a fault
        self._started = 0
        self._starts_remain = False  # True if `_start_groups` has not reached the capacity yet
        self._accounted = 0  # attempts of groups that entered a batch or were dropped
        self._failure: BaseException | None = None  # a bug in Buckeye: rollouts do not raise
        self._changed = asyncio.Event()
        self.version = 0
        self.collected = CollectedGroups(groups=[])
        """Groups of the batch that `collect` collects now, or collected last."""

    def state(self) -> dict[str, Any]:
        """Return the state for a resume: the next group, and the groups that started but are in no batch."""
        flights = [flight.index for flight in self._in_flight.values()]
        pending = [*self._pending, *flights, *(ended.group.index for ended in self._finished)]
        state = {"next_group": self._next_group, "pending": sorted(pending)}
        if self._config.token_batch_size is not None:
            state["tokens_per_rollout"] = self._tokens_per_rollout
        return state

    def set_version(self, version: int) -> None:
        """Record that the engines now sample with policy `version`."""
        self.version = version
        self._changed.set()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of paused environments, and of groups that were skipped, started or finished."""
        passed_over = {f"env/{name}/passed_over": n for name, n in self._passed_over.items()}
        return {
            **self._pauses.metrics(),
            **passed_over,
            "groups/started": self._started,
            "groups/in_flight": len(self._in_flight),
            "groups/buffered": len(self._finished),
        }

    @property
    def unaccounted(self) -> int:
        """Number of finished attempts that are neither in a batch, nor dropped, nor waiting.

        A number other than 0 is a bug: rollouts were lost or counted twice.
        """
        waiting = sum(len(ended.group.attempts) for ended in self._finished)
        running = sum(flight.attempts for flight in self._in_flight.values())
        return self._runner.attempts - self._accounted - waiting - running

    def _amount(self, group: Group) -> int:
        """Return the amount of a finished group: its rollouts, or its trained tokens."""
        return len(group.rollouts) if self._config.token_batch_size is None else group.trained_tokens

    def _expected_amount(self, size: int) -> int:
        """Return the amount of a group of `size` rollouts in flight."""
        if self._config.token_batch_size is None:
            return size
        tokens = self._tokens_per_rollout
        if not tokens:
            found = self.collected
            tokens = found.trained_tokens / max(1, found.size) or self._config.max_reply_tokens
        return max(1, round(size * tokens))

    async def collect(self, step: int) -> CollectedGroups:
        """Collect groups for batch `step` until it is full. Other groups replace dropped groups.

        Raise `FinalRunError` if all groups for `max_empty_batches` batches in a row were dropped, or if every
        environment fails for too long. `self.collected` then has the finished groups.
        """
        config = self._config
        self.collected = collected = CollectedGroups(groups=[])
        dropped_in_a_row = 0
        while True:
            if self._failure is not None:
                raise self._failure
            dropped_in_a_row = self._accept(step, collected, dropped_in_a_row)
            if self._is_full(step, collected):
                self._cut_stale(step)
                if config.token_batch_size is not None:
                    self._tokens_per_rollout = collected.trained_tokens / collected.size
                return collected
            if dropped_in_a_row >= config.max_empty_batches * self._target:
                raise self._all_dropped_error(collected)
            self._pauses.check()
            held = self._start_groups(step, self._collected_amount(collected))
            if self._starts_remain:
                await asyncio.sleep(0)
            elif self._in_flight:
                heartbeat.report(f"rollouts of batch {step}{self._heartbeat_note()}", on="inference")
                await self._wait_for_change(None)
            elif held:
                heartbeat.report(f"waits until the pause of {', '.join(sorted(held))} ends")
                await self._wait_briefly(self._pauses.seconds_left())
            else:
                since = time.monotonic()
                await self._wait_for_weights(step - config.run_ahead)
                collected.waited_seconds += time.monotonic() - since

    def _collected_amount(self, collected: CollectedGroups) -> int:
        return collected.size if self._config.token_batch_size is None else collected.trained_tokens

    def _is_full(self, step: int, collected: CollectedGroups) -> bool:
        if self._collected_amount(collected) < self._target:
            return False
        if self._config.token_batch_size is None or self._config.oversampling_factor > 1:
            return True
        return all(self._due(version) > step for version, _, _ in self._in_flight_by_version())

    def _heartbeat_note(self) -> str:
        """Return a note for the heartbeat: the paused environments, and the number of finished groups."""
        notes = [f"{', '.join(paused)}: paused"] if (paused := self._pauses.paused_environments()) else []
        if self._finished:
            notes.append(f"{len(self._finished)} finished groups wait for older groups")
        return f" ({'; '.join(notes)})" if notes else ""

    def _cut_stale(self, step: int) -> None:
        """Cut the groups in flight that are too old for every batch after `step`."""
        for flight in self._in_flight.values():
            if flight.version + self._config.max_token_age <= step:
                flight.cut()

    async def _wait_for_weights(self, version: int) -> None:
        evaluated = self._version_in_evaluation()
        if evaluated is not None:  # the engines keep this version until the evaluation ends
            heartbeat.report(f"rollouts of the evaluation of step {evaluated}", on="inference")
            await self._wait_briefly(_POLL_SECONDS)
            return
        if version != self._awaited:
            self._awaited = version
            log.info("Waiting for weight checkpoint %d", max(0, version))
        heartbeat.report(f"weights {max(0, version)}", on="trainer")
        await self._wait_for_change(self._config.weights_timeout)

    def _start_groups(self, step: int, accepted: int) -> Set[str]:
        """Start groups up to the capacity, but only some at once, so that other rollouts can continue.

        If capacity remains, but only environments that must not start a group have tasks, return these.
        """
        config, self._starts_remain = self._config, False
        last = self.version + config.run_ahead
        if config.max_steps is not None:
            last = min(last, config.max_steps - 1)
        batches = last + 1 - step
        capacity = math.ceil(config.oversampling_factor * self._target * batches)
        if self._deterministic and self._in_flight:
            return frozenset()  # start whole batches only, so that every run makes the same requests
        oldest = step - config.max_token_age
        flying = self._in_flight_by_version()
        fresh = sum(self._expected_amount(size) * n for version, size, n in flying if version >= oldest)
        started = fresh + self._buffered.total()
        limit = self._started + _STARTS_AT_ONCE
        while accepted + started < capacity:
            if self._started == limit and not self._deterministic:
                self._starts_remain = True
                break
            held = self._pauses.held_environments()
            index = self._next_index(held)
            if index is None:
                return held
            self._next_group = max(self._next_group, index + 1)
            size = self._size_of(index)
            flight = InFlightGroup(
                index,
                size,
                current_version=lambda: self.version,
                on_begin=partial(self._record_begin, size),
            )
            self._flying[None, size] += 1
            running = self._runner.start_group(self._sampler[index], size, flight)
            self._pauses.record_start(self._sampler.environment_of(index).name)
            self._in_flight[running] = flight
            self._started += 1
            running.add_done_callback(self._finish)
            started += self._expected_amount(size)
        return frozenset()

    def _next_index(self, held: Set[str]) -> int | None:
        """Return the index of the next group of an environment that is not in `held`, or None."""
        for index in self._pending:
            if self._sampler.environment_of(index).name not in held:
                self._pending.remove(index)
                return index
        if not self._sampler.has_tasks_outside(held):
            return None
        index = self._next_group
        while (name := self._sampler.environment_of(index).name) in held:
            self._passed_over[name] += 1
            index += 1
        return index

    def _size_of(self, index: int) -> int:
        """Return the number of rollouts of group `index`."""
        return (
            self._sampler.environment_of(index).rollout_settings.group_size
            or self._config.rollouts_per_example
        )

    def _record_begin(self, size: int, version: int) -> None:
        _subtract(self._flying, (None, size), 1)
        self._flying[version, size] += 1

    def _in_flight_by_version(self) -> list[tuple[int, int, int]]:
        """Return the groups in flight as triples: version, size of a group, number of groups."""
        return [
            (self.version if version is None else version, size, count)
            for (version, size), count in self._flying.items()
        ]

    def _finish(self, running: asyncio.Task[Group]) -> None:
        flight = self._in_flight.pop(running)
        _subtract(self._flying, (flight.first_version, flight.size), 1)
        if not running.cancelled():
            try:
                self._keep(running.result())
            except BaseException as error:  # raised by `collect`
                self._failure = self._failure or error
        self._changed.set()

    def _keep(self, group: Group) -> None:
        self._pauses.record_end(self._sampler.environment_of(group.index).name, group)
        oldest = group.oldest_version
        version = self.version if oldest is None else oldest
        ended = _FinishedGroup(group, version, self._fault(group), self._amount(group), bool(group.scored))
        insort(self._finished, ended, key=self._order)
        self._buffered[version] += ended.amount
        self._faulty += ended.fault is not None

    async def _wait_for_change(self, timeout: float | None) -> None:
        """Wait until a group ends (each rollout has its own deadline) or the policy version changes."""
        deadline = time.monotonic() + timeout if timeout is not None else math.inf
        while not self._changed.is_set():
            await self._wait_for_change_within(min(_POLL_SECONDS, timeout or _POLL_SECONDS))
            if not self._changed.is_set() and time.monotonic() > deadline:
                raise RunError(
                    f"no weights newer than version {self.version} within {timeout:g} s",
                    code="BK-WEIGHTS-TIMEOUT",
                    hint="check the log of the trainer, or raise orchestrator.weights_timeout",
                )
        self._changed.clear()

    async def _wait_briefly(self, seconds: float) -> None:
        """Wait for a change, for at most `seconds` and at most one poll interval."""
        await self._wait_for_change_within(min(_POLL_SECONDS, seconds))
        self._changed.clear()

    async def _wait_for_change_within(self, seconds: float) -> None:
        """Wait for a change, for at most `seconds`.

        `asyncio.wait_for` is not used: before Python 3.12, it can lose a cancellation that arrives with the
        change.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _accept(self, step: int, collected: CollectedGroups, dropped_in_a_row: int) -> int:
        """Move finished groups into the batch, or drop them.

        Return the amount of the groups that were dropped since the last group entered a batch.
        """
        if self._deterministic and self._in_flight:
            return dropped_in_a_row
        waiting, removed = self._waiting(), set[int]()
        refused = math.inf  # smallest size that did not fit: larger groups do not fit either
        for ended in self._finished:
            group, due, size = ended.group, self._due(ended.oldest), ended.amount
            open_places = self._target - self._collected_amount(collected)
            if open_places <= 0:
                if self._config.token_batch_size is None:
                    break
                if due > step:
                    continue
            reason = self._reason_to_drop(ended, step)
            if reason is None and (
                size >= refused or not self._leaves_room(size, due, waiting, open_places, step)
            ):
                refused = min(refused, size)
                if refused <= self._smallest and not self._faulty:
                    break  # no later group fits, and none is dropped: stale groups come first
                continue
            removed.add(id(ended))
            self._remove(ended)
            waiting[due] -= size
            self._accounted += len(group.attempts)
            collected.add(group, reason)
            if reason == "stale":
                self._pending.append(group.index)
            dropped = self._expected_amount(len(group.rollouts))  # an errored group may have no tokens
            dropped_in_a_row = 0 if reason is None else dropped_in_a_row + dropped
        if removed:
            self._finished = [ended for ended in self._finished if id(ended) not in removed]
        return dropped_in_a_row

    def _remove(self, ended: _FinishedGroup) -> None:
        _subtract(self._buffered, ended.oldest, ended.amount)
        self._faulty -= ended.fault is not None

    @property
    def _smallest(self) -> int:
        """Lower bound of the amounts of groups that are accepted in the order of their age."""
        ordered_by_age = self._config.token_batch_size is None and not self._deterministic
        return min(self._config.group_sizes) if ordered_by_age else 0

    def _order(self, ended: _FinishedGroup) -> tuple[int, int]:
        """Return the sort key: oldest group first. With deterministic sampling, only the index counts."""
        return 0 if self._deterministic else ended.oldest, ended.group.index

    def _due(self, oldest: int) -> int:
        """Return the number of the last batch that may have tokens of version `oldest`."""
        return oldest + self._config.max_token_age

    def _waiting(self) -> Counter[int]:
        """Return the amount of the groups, finished or in flight, by the last batch that they may enter."""
        waiting: Counter[int] = Counter()
        for version, size, count in self._in_flight_by_version():
            waiting[self._due(version)] += self._expected_amount(size) * count
        for oldest, amount in self._buffered.items():
            waiting[self._due(oldest)] += amount
        return waiting

    def _leaves_room(self, size: int, due: int, waiting: Counter[int], open_places: int, step: int) -> bool:
        return leaves_room(size, due, waiting, open_places=open_places, batch=step, batch_size=self._target)

    def _reason_to_drop(self, ended: _FinishedGroup, step: int) -> str | None:
        return "stale" if ended.is_scored and self._due(ended.oldest) < step else ended.fault

    def _fault(self, group: Group) -> str | None:
        if len(group.scored) < min_scored_rollouts(len(group.rollouts), self._config.min_group_size):
            return "stale" if any(rollout.cut for rollout in group.rollouts) else "errored"
        return drop_cause(group, self._config)

    def _all_dropped_error(self, collected: CollectedGroups) -> FinalRunError:
        dropped, errors = collected.dropped.most_common(), collected.errors
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped)
        last_error = f"; last error: {errors[-1]}" if errors else ""
        advice = _ADVICE[dropped[0][0]].replace("RUN", quoted(self._config.output_dir))
        return FinalRunError(
            f"all groups of {self._config.max_empty_batches} batches in a row were dropped: {reasons}; "
            f"{counted(len(errors), 'rollout')} errored{last_error}",
            code="BK-ENV-FAILED" if dropped[0][0] == "errored" else "BK-BATCH-EMPTY",
            hint=f"{advice}. orchestrator.max_empty_batches sets the number of batches",
        )

    async def close(self) -> None:
        """Cancel all groups in flight."""
        for running in list(self._in_flight):
            running.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)


def _subtract(counts: Counter[_Key], key: _Key, amount: int) -> None:
    """Subtract from a count, and delete it at 0, so that the counts stay few."""
    counts[key] -= amount
    if not counts[key]:
        del counts[key]
