"""Batches with a minimum number of trained tokens instead of a number of rollouts."""

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buckeye.orchestrator.deterministic_sampling import DeterministicSampling
from tests.orchestrator.fakes import FakeEngine, LetterEnvironment, make_collector

pytestmark = pytest.mark.anyio


class UnevenEngine(FakeEngine):
    """Engine whose replies have 2 to 8 tokens."""

    def _answer(self, seed, max_tokens):
        generation = super()._answer(seed, max_tokens)
        length = random.Random(seed).randint(1, 7)
        ids = [*(generation.token_ids[:1] * length), ord("$")]
        n = len(ids)
        return replace(generation, token_ids=ids, logprobs=[-0.5] * n, versions=[self.version] * n)


def sampled(rollout):
    return rollout.segments[0].token_ids.tolist()


def collector(engine, tokens, *, level=0, size=2, deterministic=None, **changes):
    options = {"batch_size": None, "token_batch_size": tokens, "weights_timeout": 5.0}
    return make_collector(
        engine, [LetterEnvironment()], [size], level=level, deterministic=deterministic, **(options | changes)
    )


async def batches(collector, engine, steps, *, deterministic=None):
    """Collect the batches of the steps. Return them, and the state after each."""
    found, states = [], []
    for step in steps:
        engine.version = step
        collector.set_version(step)
        if deterministic is not None:
            deterministic.begin(step)
        found.append(await collector.collect(step))
        states.append(collector.state())
    await collector.close()
    return found, states


def made(tokens, steps=range(4), *, state=None, **changes):
    """Return the batches of a synchronous run."""
    engine = UnevenEngine()
    sampling = DeterministicSampling(engine)
    c = collector(engine, tokens, deterministic=sampling, state=state, **changes)
    return asyncio.run(batches(c, engine, steps, deterministic=sampling))


async def test_batch_has_the_groups_that_reach_the_number_of_tokens():
    """Replies have 4 tokens, so a group of two has 8, and three groups reach 20."""
    engine = FakeEngine()
    found, states = await batches(collector(engine, 20), engine, range(3))
    assert [[group.trained_tokens for group in batch.groups] for batch in found] == [[8, 8, 8]] * 3
    assert [batch.dropped for batch in found] == [{}] * 3
    assert states[0]["tokens_per_rollout"] == 4.0


def test_errored_rollouts_have_no_trained_tokens():
    def fail(task, attempt):
        return attempt == 1

    engine = FakeEngine()
    c = make_collector(
        engine,
        [LetterEnvironment(fail=fail)],
        [4],
        level=0,
        batch_size=None,
        token_batch_size=20,
        min_group_size=1,
    )
    (batch,), _ = asyncio.run(batches(c, engine, range(1)))
    assert [group.trained_tokens for group in batch.groups] == [12, 12]  # one of four rollouts fails


@given(tokens=st.integers(1, 120), size=st.integers(1, 4))
@settings(max_examples=15)
def test_synchronous_batches_reach_the_number_and_lose_no_group(tokens, size):
    found, _ = made(tokens, size=size)
    assert all(batch.trained_tokens >= tokens for batch in found)
    assert not any(batch.dropped for batch in found)
    again, _ = made(tokens, size=size)
    assert [[g.index for g in b.groups] for b in found] == [[g.index for g in b.groups] for b in again]


def test_resumed_run_collects_the_same_batches():
    whole, states = made(40)
    rest, _ = made(40, range(2, 4), state=states[1])

    def content(found):
        return [[(g.index, [sampled(r) for r in g.rollouts]) for g in b.groups] for b in found]

    assert content(whole[2:]) == content(rest)


@pytest.mark.parametrize("level", [1, 2])
async def test_asynchronous_run_keeps_about_a_batch_per_step_ahead(level):
    """A group is 8 tokens. While batches are collected, the tokens ahead are those of `level` batches."""
    engine = FakeEngine(delay=0.001)
    c = collector(engine, 40, level=level)
    for step in range(4):
        engine.version = step
        c.set_version(step)
        batch = await c.collect(step)
        assert batch.trained_tokens == 40
        assert not batch.dropped
    ahead = c.metrics()
    await c.close()
    assert ahead["groups/in_flight"] + ahead["groups/buffered"] <= level * 5


async def test_batch_waits_for_groups_that_would_be_too_old():
    """All groups of a synchronous step enter its batch, also those that end after the number is reached."""
    engine = FakeEngine()
    c = collector(engine, 10, state={"tokens_per_rollout": 1.0})  # expects 2 of the 8 tokens of a group
    (batch,), _ = await batches(c, engine, range(1))
    assert len(batch.groups) == 5
    assert not batch.dropped


async def test_oversampling_closes_the_batch_at_the_number():
    engine = FakeEngine()
    slow = collector(engine, 16, oversampling_factor=2.0, state={"tokens_per_rollout": 4.0})
    batch = await slow.collect(0)
    assert batch.trained_tokens >= 16
    await slow.close()
