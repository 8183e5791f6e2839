"""Pauses for environments that fail. Other environments continue. Each pause ends with a retry."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from buckeye.base.columns import quoted
from buckeye.config.environments import EnvPauseConfig
from buckeye.envs.registry import CALLER
from buckeye.errors import FinalRunError
from buckeye.orchestrator.rollout import INVALID_BOUNDARIES, Group, Rollout

log = logging.getLogger(__name__)

_MAX_DOUBLINGS = 100  # more would exceed the range of a float after a week of pauses


@dataclass(slots=True)
class _State:
    """State of one environment.

    `failed` is the number of groups that failed in a row, and `since` the time of the first. `pauses` is the
    number of pauses in a row, and `until` the end of the current pause. `tried` is True while the group runs
    that retries the environment after a pause.
    """

    failed: int = 0
    since: float = 0.0
    pauses: int = 0
    until: float | None = None
    tried: bool = False
    works: bool = False
    last_error: str = ""
    invalid_groups: int = 0  # groups with invalid tasks, before the first scored group
    is_misconfigured: bool = False


class EnvironmentPauses:
    """Failure counts of each environment of the run in the directory `run`, and the resulting pauses.

    `clock` returns seconds.
    """

    def __init__(
        self,
        names: Iterable[str],
        settings: EnvPauseConfig,
        run: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        names = list(names)
        is_object = CALLER in names  # other processes cannot load it
        self._check = "`buckeye.evaluate`" if is_object else f"`buckeye env check {quoted(run)}`"
        self._clock = clock
        self._states = {name: _State() for name in names}

    def held_environments(self) -> frozenset[str]:
        """Return the environments that may not start a group now."""
        return frozenset(name for name, state in self._states.items() if self._is_held(name, state))

    def paused_environments(self) -> list[str]:
        """Return the environments that are paused now."""
        return [name for name, state in self._states.items() if state.until is not None]

    def record_start(self, name: str) -> None:
        """Record the start of a group. After a pause, no other group starts until this group ends."""
        state = self._states[name]
        state.tried = state.pauses > 0

    def record_end(self, name: str, group: Group) -> None:
        """Record the end of a group.

        A group with an inference failure or an invalid task does not count as failed.
        """
        state = self._states[name]
        state.tried = False
        if group.scored:
            if state.pauses:
                log.info("Environment %s has recovered", name)
            self._states[name] = _State(works=True)
        elif invalid := [
            rollout for rollout in group.rollouts if rollout.outcome.boundary in INVALID_BOUNDARIES
        ]:
            self._record_invalid_task(state, invalid[0])
        elif all(rollout.outcome.boundary != "model" for rollout in group.rollouts):
            self._record_failure(name, state, group.errors[-1])

    def seconds_left(self) -> float:
        """Return the seconds until the first pause ends; 0 without a pause."""
        ends = [state.until for state in self._states.values() if state.until is not None]
        return max(0.0, min(ends) - self._clock()) if ends else 0.0

    def check(self) -> None:
        """Raise `FinalRunError` if every environment has failed for too long, or has never worked.

        Also raise it if the first groups of an environment all have invalid tasks, or if the first group
        finds its configuration invalid.
        """
        states = self._states
        for state in states.values():
            if not state.works and state.is_misconfigured:
                raise FinalRunError(
                    f"no task can run: {state.last_error}",
                    code="BK-ENV-TASKS",
                    hint="correct the configuration of the environment",
                )
            if not state.works and state.invalid_groups >= self._settings.after_failures:
                raise FinalRunError(
                    f"the first {state.invalid_groups} groups have invalid tasks: {state.last_error}",
                    code="BK-ENV-TASKS",
                    hint=f"run {self._check}",
                )
        if not all(state.pauses for state in states.values()):
            return
        last = max(states.values(), key=lambda state: state.since)
        if not any(state.works for state in states.values()):
            raise FinalRunError(
                f"every rollout has failed; last error: {last.last_error}",
                code="BK-ENV-FAILED",
                hint=f"fix the environment, and test it with {self._check}",
            )
        seconds, limit = self._clock() - last.since, self._settings.give_up_seconds
        if seconds >= limit:
            raise FinalRunError(
                f"all environments have failed for {seconds:.0f} s; last error: {last.last_error}",
                code="BK-ENV-FAILED",
                hint=f"run {self._check}. The limit is env_pause.give_up_seconds ({limit:g} s)",
            )

    def metrics(self) -> dict[str, float]:
        """Return per environment `paused` (1 or 0), and `pauses`, the number of pauses in a row."""
        return {
            f"env/{name}/{what}": value
            for name, state in self._states.items()
            for what, value in (("paused", float(state.until is not None)), ("pauses", state.pauses))
        }

    def _is_held(self, name: str, state: _State) -> bool:
        if state.until is not None and self._clock() >= state.until:
            state.until = None
            log.info("Environment %s: the pause has ended, retrying", name)
        return state.until is not None or state.tried

    def _record_invalid_task(self, state: _State, rollout: Rollout) -> None:
        state.invalid_groups += 1
        state.is_misconfigured |= rollout.outcome.boundary == "config"
        state.last_error = f"{rollout.env_name}, task {rollout.task.id}: {rollout.outcome.error}"
        log.warning("Dropping a group with an invalid task: %s", state.last_error)

    def _record_failure(self, name: str, state: _State, error: str) -> None:
        state.last_error = error
        if state.until is not None:
            return  # the group started before the pause
        if not state.failed and not state.pauses:
            state.since = self._clock()
        state.failed += 1
        if not state.pauses and state.failed < self._settings.after_failures:
            return
        doubled = self._settings.seconds * 2 ** min(state.pauses, _MAX_DOUBLINGS)
        seconds = min(doubled, self._settings.max_seconds)
        state.pauses += 1
        state.until = self._clock() + seconds
        log.warning(
            "Environment %s is paused for %g s: %d groups in a row failed; last error: %s",
            name,
            seconds,
            state.failed,
            error,
        )
