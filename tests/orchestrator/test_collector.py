"""Groups in flight: capacity, staleness, retries, drops, and a state that resumes exactly."""

import asyncio
import logging
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buckeye.base import heartbeat
from buckeye.config.buffer import SimpleBufferConfig
from buckeye.config.environments import EnvPauseConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.base import Outcome
from buckeye.envs.outcome_validation import error_outcome
from buckeye.errors import FinalRunError, InferenceError, RunError
from buckeye.inference.client import ReplyTimeoutError
from buckeye.orchestrator.deterministic_sampling import DeterministicSampling
from buckeye.orchestrator.filters import min_scored_rollouts
from tests.waiting import HANG

from .fakes import FakeEngine, LetterEnvironment, make_collector

pytestmark = pytest.mark.anyio

FRESH = {"next_group": 0, "pending": []}


@pytest.fixture
def weight_waits(monkeypatch):
    """Record the waits for weights."""
    waits = []
    monkeypatch.setattr(heartbeat, "report", lambda what, on="": on == "trainer" and waits.append(what))
    return waits


def waiting(c):
    """Return the number of groups in flight or buffered."""
    counts = c.metrics()
    return counts["groups/in_flight"] + counts["groups/buffered"]


def collector(engine, env, *, groups=2, size=4, **changes):
    options = {"retries": 1, "state": FRESH, "batch_size": groups * size, "min_group_size": min(2, size)}
    options |= {"max_empty_batches": 3, "weights_timeout": 5.0}
    return make_collector(engine, [env], [size], **(options | changes))


def first_batch(env, engine=None, **settings):
    engine = engine or FakeEngine()
    (batch,) = asyncio.run(batches(collector(engine, env, **settings), engine, 1))
    return batch


async def batches(collector, engine, count, *, first=0, lag=0, deterministic=None):
    """Collect `count` batches while a trainer that is `lag` steps behind publishes versions."""
    collected = []
    for step in range(first, first + count):
        version = max(0, step - lag)
        engine.version = version
        collector.set_version(version)
        if deterministic is not None:
            deterministic.begin(step)
        collected.append(await collector.collect(step))
    await collector.close()
    return collected


@given(level=st.integers(0, 3), lag=st.integers(0, 3), groups=st.integers(1, 3))
@settings(max_examples=15)
def test_no_batch_holds_tokens_older_than_the_async_level(level, lag, groups):
    engine = FakeEngine()
    deterministic = DeterministicSampling(engine) if level == 0 else None
    settings = {"level": level, "groups": groups, "size": 2, "deterministic": deterministic}
    c = collector(engine, LetterEnvironment(), **settings)
    found = asyncio.run(batches(c, engine, 5, lag=min(lag, level), deterministic=deterministic))
    for step, batch in enumerate(found):
        assert len(batch.groups) == groups
        assert all(step - g.oldest_version <= level for g in batch.groups)


@pytest.mark.parametrize(
    ("settings", "left"),
    [({"level": 2}, 4), ({"level": 3, "max_steps": 1}, 0)],  # two batches of two groups; the last step
)
async def test_groups_run_ahead_by_exactly_the_async_level_but_not_beyond_the_last_step(settings, left):
    c = collector(FakeEngine(delay=0.01), LetterEnvironment(), groups=2, **settings)
    await c.collect(0)
    ahead = waiting(c)
    await c.close()
    assert ahead == left


async def test_stale_group_is_dropped_and_runs_again():
    engine = FakeEngine(version=0)
    c = collector(engine, LetterEnvironment(), level=1, groups=2, max_off_policy_steps=1)
    await c.collect(0)  # two more groups of version 0 are now in flight
    await asyncio.sleep(0.01)
    engine.version = 2
    c.set_version(2)
    batch = await c.collect(2)
    indices = {g.index for g in batch.groups}
    await c.close()
    assert batch.dropped == {"stale": 2}
    assert indices == {2, 3}  # the same tasks, sampled anew
    assert all(g.oldest_version == 2 for g in batch.groups)


def test_a_failed_rollout_is_retried_and_then_leaves_a_smaller_group():
    def fail(task, attempt):
        return attempt in (1, 2, 3, 5)  # one member fails twice; the others are retried at most once

    batch = first_batch(LetterEnvironment(size=1, fail=fail), groups=1)
    (group,) = batch.groups
    assert [len(rollout.earlier_attempts) for rollout in group.rollouts] == [1, 1, 1, 0]
    assert [rollout.reward is None for rollout in group.rollouts] == [True, False, False, False]
    assert all(play.outcome.error for rollout in group.rollouts for play in rollout.earlier_attempts)
    assert batch.account() == {"played": 7, "trained": 3, "dropped": 0, "failed": 4, "retried": 3, "cut": 0}
    assert len(batch.errors) == 1


def test_an_invalid_task_is_not_retried_and_ends_the_run_before_any_pause():
    class Invalid(LetterEnvironment):
        async def rollout(self, task, policy):
            self.attempts[task.id] = self.attempts.get(task.id, 0) + 1
            return Outcome(reward=None, error="no server has a tool 'nothing_such'", boundary="task")

    env = Invalid(size=1)
    with pytest.raises(FinalRunError, match="nothing_such"):
        first_batch(env, groups=1, size=4, retries=3)
    assert env.attempts["letters-0"] <= 4 * (EnvPauseConfig().after_failures + 2)  # two groups are in flight


class LongOnesFail(LetterEnvironment):
    """Environment in which half of the replies are long, and three in five long ones fail after the reply."""

    def __init__(self):
        super().__init__(size=1)
        self.random = random.Random(3)

    async def rollout(self, task, policy):
        reply = await policy.chat(task.messages)
        is_long = reply.text[0] in "ab"
        if is_long and self.random.random() < 0.6:
            raise RuntimeError("too long for this tool")
        return Outcome(reward=1.0, components={"long": float(is_long)})


def test_errors_that_a_reply_may_cause_are_not_retried():
    """A retry would hide the failure rate, and train on the short replies that replace the failed ones."""
    batch = first_batch(LongOnesFail(), level=0, groups=200, retries=3, min_group_size=1)
    account = batch.account()
    assert account["played"] == account["trained"] + account["failed"] + account["dropped"]
    assert account["failed"] / account["played"] == pytest.approx(0.3, abs=0.05)  # retries do not change it
    scored = [r for g in batch.groups for r in g.scored]
    share = sum(r.outcome.components["long"] for r in scored) / len(scored)
    assert account["retried"] == 0
    assert share == pytest.approx(0.2 / 0.7, abs=0.05)  # failed long rollouts are not trained on
    assert len(batch.errors) == account["failed"]


def test_lost_worker_is_retried():
    class Gone(LetterEnvironment):
        async def rollout(self, task, policy):
            await policy.chat(task.messages)
            self.attempts["all"] = attempt = self.attempts.get("all", 0) + 1
            if attempt <= 2:
                return error_outcome("worker", "its worker is gone")
            return Outcome(reward=1.0)

    batch = first_batch(Gone(size=1), level=0, groups=1)
    assert batch.account() == {"played": 6, "trained": 4, "dropped": 0, "failed": 2, "retried": 2, "cut": 0}


def test_rollout_without_a_reply_is_retried():
    """Neither depends on the policy. A timeout does: the reply may have been long, so it is not retried."""
    silent, broken = iter([1]), iter([1])

    class Engine(FakeEngine):
        async def generate(self, prompt_ids, params):
            if next(silent, 0):
                raise ReplyTimeoutError("http://x did not answer POST /generate within 3 s.")
            if next(broken, 0):
                raise InferenceError("http://x refused")
            return await super().generate(prompt_ids, params)

    env = LetterEnvironment(size=1, fail=lambda task, attempt: attempt == 5)
    batch = first_batch(env, Engine(), groups=1)
    boundaries = [[p.outcome.boundary for p in r.earlier_attempts] for r in batch.groups[0].rollouts]
    assert sorted(boundaries, key=str) == [["model"], ["step"], [], []]
    assert [r.outcome.boundary for r in batch.groups[0].rollouts if r.reward is None] == ["timeout"]


@pytest.mark.parametrize(
    ("failing", "least", "trained"),
    [(2, 2, [2]), (2, 3, []), (1, 3, [3]), (3, 1, [1]), (4, 1, [])],
)
def test_incomplete_group_is_trained_if_large_enough(failing, least, trained):
    def fail(task, attempt):
        return task.id == "letters-0" and attempt <= 2 * failing  # each fails, also at its second attempt

    batch = first_batch(LetterEnvironment(size=2, fail=fail), min_group_size=least)
    sizes = {g.rollouts[0].task.id: len(g.scored) for g in batch.groups if g.index < 2}
    assert [size for task, size in sizes.items() if task == "letters-0"] == trained
    assert sizes["letters-1"] == 4
    assert batch.dropped == ({} if trained else {"errored": 1})
    assert len(batch.errors) == failing
    assert all(reward in (0.0, 1.0) for reward in batch.sampled_rewards)
    assert len(batch.sampled_rewards) == 4 * (3 - len(trained)) - failing


@pytest.mark.parametrize(
    ("size", "asked", "least"),
    [(1, None, 1), (2, None, 2), (3, None, 2), (5, None, 3), (16, None, 8), (4, 1, 1)],
)
def test_min_scored_rollouts_defaults_to_half(size, asked, least):
    assert min_scored_rollouts(size, asked) == least


def test_min_group_size_above_group_size_is_refused(refusal):
    with refusal(ValueError):
        OrchestratorConfig(batch_size=8, rollouts_per_example=4, min_group_size=5)


def test_an_environment_that_always_fails_ends_the_run_with_the_reason():
    with pytest.raises(FinalRunError, match="errored"):
        first_batch(LetterEnvironment(fail=lambda task, attempt: True))


def test_groups_without_spread_are_replaced_when_asked():
    batch = first_batch(LetterEnvironment(), groups=4, zero_spread="drop")
    assert len(batch.groups) == 4
    assert all(len(set(g.rewards)) > 1 for g in batch.groups)
    assert len(batch.sampled_rewards) == 4 * (len(batch.groups) + batch.dropped["no_spread"])


@pytest.mark.parametrize("reward", [1.0, 0.0])
def test_run_ends_with_the_reason_if_all_groups_are_dropped(reward, refusal):
    class Constant(LetterEnvironment):
        async def rollout(self, task, policy):
            await policy.chat(task.messages)
            return Outcome(reward=reward)

    drop = SimpleBufferConfig(online_difficulty_filtering=True)
    with refusal(FinalRunError):
        first_batch(Constant(), buffer=drop)


async def test_weights_deadline_starts_after_an_evaluation(refusal, weight_waits):
    measuring = [0]
    settings = {"weights_timeout": 0.1, "version_in_evaluation": lambda: next(iter(measuring), None)}
    c = collector(FakeEngine(), LetterEnvironment(), **settings)
    collecting = asyncio.create_task(c.collect(2))  # which needs version 1
    await asyncio.sleep(0.3)
    assert not collecting.done()
    assert not weight_waits
    measuring.pop()
    with refusal(RunError):
        await collecting
    await c.close()
    assert weight_waits == ["weights 1"]


async def test_waiting_for_weights_has_a_deadline(refusal):
    engine = FakeEngine()
    settings = {"weights_timeout": 0.05, "deterministic": DeterministicSampling(engine)}
    c = collector(engine, LetterEnvironment(), level=0, **settings)
    with refusal(RunError):
        await c.collect(1)  # version 1 is never published
    await c.close()


@pytest.mark.parametrize("turns", range(5))
async def test_cancellation_during_a_change_is_not_lost(turns):
    class Endless(LetterEnvironment):
        async def rollout(self, task, policy):
            await asyncio.Event().wait()

    c = collector(FakeEngine(), Endless())
    collecting = asyncio.create_task(c.collect(0))
    await asyncio.sleep(0.05)
    c.set_version(0)
    for _ in range(turns):  # event loop iterations, during which the version arrives
        await asyncio.sleep(0)
    collecting.cancel()
    done, _ = await asyncio.wait([collecting], timeout=HANG)
    await c.close()
    assert done
    assert collecting.cancelled()


async def test_state_continues_with_the_same_tasks():
    """Five batches in one run, and two, a kill and three, use the same group indices; none is used twice."""
    engine = FakeEngine()
    straight = await batches(collector(engine, LetterEnvironment()), engine, 5)
    killed = collector(engine, LetterEnvironment())
    before = await batches(killed, engine, 2)
    resumed = collector(engine, LetterEnvironment(), state=killed.state())
    after = await batches(resumed, engine, 3, first=2)
    used, again = ([g.index for b in found for g in b.groups] for found in (straight, before + after))
    assert sorted(again) == sorted(used)
    assert len(set(again)) == len(again)


def test_synchronous_mode_batches_are_independent_of_timing():
    class Dawdles(LetterEnvironment):
        """Environment whose rollouts each wait for a random time before the request."""

        def __init__(self, seed):
            super().__init__(turns=2)
            self.times = random.Random(seed)

        async def rollout(self, task, policy):
            await asyncio.sleep(self.times.uniform(0, 0.01))
            return await super().rollout(task, policy)

    async def play(seed):
        engine = FakeEngine()
        deterministic = DeterministicSampling(engine)
        env = Dawdles(seed)
        c = collector(engine, env, level=0, groups=3, deterministic=deterministic)
        await batches(c, engine, 3, deterministic=deterministic)
        return engine.waves

    one, other = asyncio.run(play(1)), asyncio.run(play(2))
    assert one == other
    assert len(one) == 6  # three steps of two turns
    assert all(len(prompts) == 12 for prompts, _ in one)


def test_an_environment_that_cancels_itself_is_an_errored_rollout():
    class Cancels(LetterEnvironment):
        async def rollout(self, task, policy):
            if task.id == "letters-3":
                raise asyncio.CancelledError
            return await super().rollout(task, policy)

    batch = first_batch(Cancels(size=4), groups=4)
    assert len(batch.groups) == 4  # one of the four tasks can never be used
    assert batch.dropped["errored"] >= 1
    assert len(batch.errors) == 4 * batch.dropped["errored"]
    assert "cancelled" in batch.errors[-1]


async def test_wait_for_weights_wakes_once_per_change_and_is_timed(weight_waits, caplog):
    caplog.set_level(logging.INFO)
    engine = FakeEngine()
    c = collector(engine, LetterEnvironment(), level=1)
    collecting = asyncio.create_task(c.collect(2))  # needs version 1
    while not weight_waits:
        await asyncio.sleep(0)  # until it has begun to wait
    for _ in range(2):
        await asyncio.sleep(0.02)
        c.set_version(0)
    await asyncio.sleep(0.02)
    seen = list(weight_waits)
    engine.version = 1
    c.set_version(1)
    batch = await collecting
    await c.close()
    assert seen == ["weights 1"] * 3
    assert caplog.messages.count("Waiting for weight checkpoint 1") == 1
    assert batch.waited_seconds >= 0.03  # of 0.06, minus the delay until a busy machine checks again
