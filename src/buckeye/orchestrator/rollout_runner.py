"""Rollout runners. They run rollouts with a deadline, and retry failures that the policy did not cause."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.base import ROLLOUT_DEADLINE, GroupEnvironment, Outcome, Task
from buckeye.envs.outcome_validation import error_outcome, outcome_of_exception, validate_outcome
from buckeye.errors import THIRD_PARTY_ERRORS, InferenceError
from buckeye.inference.client import InferenceClient, ReplyTimeoutError, SamplingParams
from buckeye.inference.render import ChatRenderer
from buckeye.orchestrator.advantages import RewardShaping, UserFunctionError
from buckeye.orchestrator.deterministic_sampling import DeterministicSampling
from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.group_scoring import score_pending_outcomes
from buckeye.orchestrator.policy import RecordingPolicy, RolloutPolicy, Sampler, derive_seed
from buckeye.orchestrator.rollout import INVALID_BOUNDARIES, Group, InFlightGroup, Rollout
from buckeye.orchestrator.task_sampler import GroupTask

log = logging.getLogger(__name__)

CLEANUP_SECONDS = 5.0
"""Time limit of the cleanup of cancelled rollouts. The launcher kills the orchestrator after ten seconds."""
_MAX_WARNINGS = 20  # code locations whose first error is logged as a warning
_RETRIED_BOUNDARIES = ("load", "reset", "model", "worker")


PolicyFactory = Callable[[NamedEnvironment, int], RolloutPolicy]
"""Function that makes the policy of one rollout, from an environment and a seed."""


class RolloutRunner:
    """Runner of rollouts, with a separate policy for every attempt.

    `make_policy` returns the policy factory for one rollout and its retries. A rollout and its `timeout`
    (seconds) start when `wait_for_slot` has returned. After an error that the policy cannot have caused, the
    runner retries the rollout up to `retries` times.
    """

    def __init__(
        self,
        make_policy: Callable[[InFlightGroup], PolicyFactory],
        *,
        seed: int,
        timeout: float,
        retries: int,
        max_concurrent: int | None = None,
        shaping: RewardShaping | None = None,
        wait_for_slot: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._make_policy = make_policy
        self._seed = seed
        self._timeout = timeout
        self._retries = retries
        self._shaping = shaping
        self._warned: set[tuple[str, str]] = set()
        self._wait_for_slot = wait_for_slot
        self._slots = asyncio.Semaphore(max_concurrent) if max_concurrent else contextlib.nullcontext()
        self.attempts = 0
        """Number of finished attempts, including failed ones."""

    def start_group(
        self, group: GroupTask, size: int, flight: InFlightGroup | None = None
    ) -> asyncio.Task[Group]:
        """Start `size` rollouts of one task.

        In deterministic sampling, all join before this function returns.
        """
        flight = flight or InFlightGroup(group.index, size)
        members = [
            self.start(group.env, group.task, group.index, member, flight=flight) for member in range(size)
        ]
        return asyncio.create_task(self._gather_group(group, members))

    def start(
        self, env: NamedEnvironment, task: Task, *order: int, flight: InFlightGroup | None = None
    ) -> asyncio.Task[Rollout]:
        """Start one rollout. `order` seeds its sampling."""
        return asyncio.create_task(self._run_in_slot(env, task, order, flight or InFlightGroup()))

    async def _run_in_slot(
        self, env: NamedEnvironment, task: Task, order: tuple[int, ...], flight: InFlightGroup
    ) -> Rollout:
        make_policy = self._make_policy(flight)
        async with env.admission.slot(), self._slots:  # a rollout that waits for admission holds no slot
            if self._wait_for_slot is not None:
                await self._wait_for_slot()
            return await self._run_with_retries(env, task, make_policy, order, flight)

    async def _run_with_retries(
        self,
        env: NamedEnvironment,
        task: Task,
        make_policy: PolicyFactory,
        order: tuple[int, ...],
        flight: InFlightGroup,
    ) -> Rollout:
        flight.begin()
        failed: list[Rollout] = []
        while True:
            policy = make_policy(env, derive_seed(self._seed, *order, flight.losses + len(failed)))
            rollout = await self._run_attempt(env, task, policy)
            self.attempts += 1
            flight.attempts += 1
            if rollout.outcome.error is not None:
                self._log_error(rollout)
            if len(failed) == self._retries or flight.is_cut or not self._may_retry(rollout):
                return replace(rollout, earlier_attempts=tuple(failed)) if failed else rollout
            failed.append(rollout)
            await env.admission.wait_for_start()

    def _may_retry(self, rollout: Rollout) -> bool:
        """Return True if the rollout failed and the policy cannot be the cause.

        Retries help after a failure before the first request to the policy, a failure of the engines, and the
        end of a worker process. They do not help after an invalid task or configuration.
        """
        if rollout.outcome.error is None or rollout.outcome.boundary in INVALID_BOUNDARIES:
            return False
        return rollout.outcome.boundary in _RETRIED_BOUNDARIES or not rollout.sampling_seconds

    def _log_error(self, rollout: Rollout) -> None:
        """Log an error. The first error of each code location of an environment is a warning with a trace."""
        log.debug("rollout of %s failed: %s", rollout.task.id, rollout.outcome.error)
        trace = rollout.outcome.trace
        if trace and (rollout.env_name, trace[-1]) not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add((rollout.env_name, trace[-1]))
            frames = "".join(f"\n  {frame}" for frame in trace)
            log.warning("%s, task %s: %s%s", rollout.env_name, rollout.task.id, rollout.outcome.error, frames)

    async def _run_attempt(self, env: NamedEnvironment, task: Task, policy: RolloutPolicy) -> Rollout:
        clock = asyncio.get_running_loop().time
        started = clock()
        environment = env.environment
        # `isinstance` of a protocol takes a tenth of the time of a short rollout
        run = getattr(environment, "rollout_in_group", environment.rollout)
        result = await run_rollout(
            lambda: run(task, policy), env.rollout_settings.timeout or self._timeout, environment
        )
        outcome = _check_turn_rewards(result, policy)
        rollout = Rollout(
            env_name=env.name,
            task=task,
            outcome=outcome,
            segments=tuple(policy.segments),
            truncated=policy.finish_reason == "length",
            turns=policy.turns,
            seconds=clock() - started,
            sampling_seconds=policy.sampling_seconds,
            calls=tuple(call.since(started) for call in policy.calls),
            end_time=clock(),
            turns_extended=policy.turns_extended,
            turns_branched=policy.turns_branched,
            temperature=policy.temperature,
            replies=tuple(policy.replies),
            messages=tuple(policy.messages),
            prompt_tokens=policy.prompt_tokens,
            reply_tokens=policy.completion_tokens,
            cut=policy.was_cut,
        )
        return rollout if self._shaping is None else shape_reward(rollout, self._shaping)

    async def _gather_group(self, group: GroupTask, members: Sequence[asyncio.Task[Rollout]]) -> Group:
        try:
            ended, _ = await asyncio.wait(members, return_when=asyncio.FIRST_EXCEPTION)
            for member in ended:
                member.result()
        except asyncio.CancelledError:
            for member in members:
                member.cancel()
            await asyncio.wait(members, timeout=CLEANUP_SECONDS)
            raise
        rollouts = [member.result() for member in members]
        return Group(index=group.index, rollouts=await self._score_group(group, rollouts))

    async def _score_group(self, group: GroupTask, ended: Sequence[Rollout]) -> tuple[Rollout, ...]:
        """Return the rollouts, with rewards if the environment scores whole groups."""
        before, turns = [rollout.outcome for rollout in ended], [rollout.turns for rollout in ended]
        env, timeout = group.env.environment, group.env.rollout_settings.timeout or self._timeout
        after = await score_pending_outcomes(env, group.task, before, turns, timeout=timeout)
        rollouts = [replace(rollout, outcome=outcome) for rollout, outcome in zip(ended, after, strict=True)]
        pending = [outcome.pending is not None for outcome in before]
        for rollout, waited in zip(rollouts, pending, strict=True):
            if waited and rollout.reward is None:
                self._log_error(rollout)
        return tuple(
            shape_reward(rollout, self._shaping) if waited and self._shaping is not None else rollout
            for rollout, waited in zip(rollouts, pending, strict=True)
        )


class RecordingRolloutRunner(RolloutRunner):
    """Runner that samples from the current policy and records every token.

    `sampler` is the inference client, or deterministic sampling on top of it. Deterministic sampling sends
    whole batches, so it ignores `max_concurrent`.
    """

    def __init__(
        self,
        *,
        sampler: Sampler | DeterministicSampling,
        renderer: ChatRenderer,
        params: SamplingParams,
        seq_len: int,
        seed: int,
        timeout: float,
        retries: int,
        max_concurrent: int | None = None,
        shaping: RewardShaping | None = None,
    ) -> None:
        super().__init__(
            self._session_policy_factory,
            seed=seed,
            timeout=timeout,
            retries=retries,
            max_concurrent=max_concurrent,
            shaping=shaping,
            wait_for_slot=sampler.wait_for_slot if isinstance(sampler, InferenceClient) else None,
        )
        self._sampler = sampler
        self._renderer = renderer
        self._params = params
        self._seq_len = seq_len

    def start(
        self, env: NamedEnvironment, task: Task, *order: int, flight: InFlightGroup | None = None
    ) -> asyncio.Task[Rollout]:
        """Start one rollout. In deterministic sampling, the rollout joins before this function returns."""
        if not isinstance(self._sampler, DeterministicSampling):
            return super().start(env, task, *order, flight=flight)
        participant, flight = self._sampler.join(*order), flight or InFlightGroup()
        make_policy = self._policy_factory(participant, flight)

        async def run_at_start_time() -> Rollout:
            await env.admission.wait_for_start()
            return await self._run_with_retries(env, task, make_policy, order, flight)

        running = asyncio.create_task(run_at_start_time())
        running.add_done_callback(lambda _: participant.leave())
        return running

    def _session_policy_factory(self, flight: InFlightGroup) -> PolicyFactory:
        assert not isinstance(self._sampler, DeterministicSampling)
        if not isinstance(self._sampler, InferenceClient):
            return self._policy_factory(self._sampler, flight)
        session = self._sampler.session()
        flight.add_session(session)
        return self._policy_factory(session, flight)

    def _policy_factory(self, sampler: Sampler, flight: InFlightGroup) -> PolicyFactory:
        def make_policy(env: NamedEnvironment, seed: int) -> RecordingPolicy:
            return RecordingPolicy(
                sampler=sampler,
                renderer=self._renderer,
                params=_environment_params(env, self._params),
                seq_len=self._seq_len,
                seed=seed,
                is_cut=lambda: flight.is_cut,
            )

        return make_policy


def recording_runner(
    config: OrchestratorConfig,
    sampler: Sampler | DeterministicSampling,
    renderer: ChatRenderer,
    *,
    seed: int,
    params: SamplingParams,
    shaping: RewardShaping | None = None,
) -> RecordingRolloutRunner:
    """Return a runner with the limits of a configuration."""
    return RecordingRolloutRunner(
        sampler=sampler,
        renderer=renderer,
        params=params,
        seq_len=config.seq_len,
        seed=seed,
        timeout=config.rollout_timeout,
        retries=config.max_rollout_retries,
        max_concurrent=config.max_concurrent,
        shaping=shaping,
    )


async def run_rollout(
    rollout: Callable[[], Awaitable[Outcome]], timeout: float, environment: object = None
) -> Outcome:
    """Return the checked outcome of a rollout.

    The outcome has an error if the rollout takes more than `timeout` seconds, raises an exception, or does
    not return an outcome. The error names the function of `environment`. Raise `CancelledError` only if the
    caller's task is cancelled.
    """
    token = ROLLOUT_DEADLINE.set(time.monotonic() + timeout)
    try:
        async with asyncio.timeout(timeout):
            result = rollout()
            outcome = validate_outcome(await result if inspect.isawaitable(result) else result, environment)
        if outcome.pending is not None and not isinstance(environment, GroupEnvironment):
            return error_outcome("score", "the outcome is pending, but the environment has no finish_group()")
        return outcome
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise  # the run is ending
        return error_outcome("step", "the environment cancelled its rollout")
    except TimeoutError:
        return error_outcome("timeout", f"no outcome within {timeout:g} s")
    except ReplyTimeoutError as error:
        return error_outcome("timeout", str(error))
    except THIRD_PARTY_ERRORS as error:  # an exception ends only this rollout
        return outcome_of_exception("model" if isinstance(error, InferenceError) else "step", error)
    finally:
        ROLLOUT_DEADLINE.reset(token)


def _environment_params(env: NamedEnvironment, params: SamplingParams) -> SamplingParams:
    """Return the sampling parameters for this environment."""
    overrides = env.rollout_settings
    return replace(
        params,
        temperature=params.temperature if overrides.temperature is None else overrides.temperature,
        max_tokens=params.max_tokens if overrides.max_tokens is None else overrides.max_tokens,
    )


def shape_reward(rollout: Rollout, shaping: RewardShaping) -> Rollout:
    """Return the rollout with the amounts of reward shaping. An errored rollout stays unchanged.

    If the user's function fails, the rollout becomes errored.
    """
    if rollout.reward is None:
        return rollout
    try:
        return replace(rollout, shaping=shaping.amounts(rollout.as_scored()))
    except UserFunctionError as error:
        return replace(rollout, outcome=error_outcome("score", str(error)))


def _check_turn_rewards(outcome: Outcome, policy: RolloutPolicy) -> Outcome:
    """Return the outcome, or an error if the number of its turn_rewards does not match the turns."""
    if outcome.turn_rewards is None:
        return outcome
    count, max_count = len(outcome.turn_rewards), policy.turns + policy.turns_without_room
    if policy.turns <= count <= max_count:
        return outcome
    return error_outcome("score", f"turn_rewards has {count} entries for {max_count} turns")
