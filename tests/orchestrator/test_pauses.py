"""A failing environment is paused while the others continue; later it is tried again."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from buckeye.config.environments import EnvPauseConfig
from buckeye.envs.registry import CALLER
from buckeye.errors import FinalRunError
from buckeye.orchestrator.deterministic_sampling import DeterministicSampling
from buckeye.orchestrator.pauses import EnvironmentPauses

from .fakes import FakeEngine, LetterEnvironment, make_collector
from .made_rollouts import group, rollout

pytestmark = pytest.mark.anyio

SETTINGS = EnvPauseConfig(after_failures=2, seconds=10, max_seconds=30, give_up_seconds=100)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def played(name, *, reward=None, boundary="step"):
    return group(rollout(reward, env_name=name, boundary=boundary))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pauses(clock):
    return EnvironmentPauses(["a", "b"], SETTINGS, Path("run"), clock)


def fail(pauses, name, times=1, **how):
    for _ in range(times):
        pauses.record_start(name)
        pauses.record_end(name, played(name, **how))


def work(pauses, name):
    fail(pauses, name, reward=0.0)  # a reward of 0 is a reward


@pytest.mark.parametrize(
    ("name", "command"), [("a", "`buckeye env check run`"), (CALLER, "`buckeye.evaluate`")]
)
def test_a_failure_names_a_check_that_can_load_the_environment(clock, name, command):
    pauses = EnvironmentPauses([name], SETTINGS, Path("run"), clock)
    fail(pauses, name, SETTINGS.after_failures)
    with pytest.raises(FinalRunError) as ended:
        pauses.check()
    assert command in ended.value.hint


def test_an_environment_may_fail_for_ever(pauses, clock):
    fail(pauses, "a")
    for _ in range(1100):
        work(pauses, "b")
        fail(pauses, "a")
        assert pauses.held_environments() == {"a"}
        clock.now += 30
        assert pauses.held_environments() == set()


def test_failures_in_a_row_pause_one_environment(pauses, clock):
    fail(pauses, "a")
    work(pauses, "a")
    fail(pauses, "a")
    assert pauses.held_environments() == set()
    fail(pauses, "a")
    assert pauses.held_environments() == {"a"}
    assert pauses.seconds_left() == 10
    clock.now += 9.9
    assert pauses.held_environments() == {"a"}
    clock.now += 0.1
    assert pauses.held_environments() == set()


def test_after_a_pause_one_group_is_tried_and_the_next_pause_is_twice_as_long(pauses, clock):
    work(pauses, "b")
    fail(pauses, "a", 2)
    for seconds in (10, 20, 30, 30):
        assert pauses.seconds_left() == seconds
        clock.now += seconds
        assert pauses.held_environments() == set()
        pauses.record_start("a")
        assert pauses.held_environments() == {"a"}  # until the group has ended
        pauses.record_end("a", played("a"))
    clock.now += 30
    work(pauses, "a")
    fail(pauses, "a")
    assert pauses.held_environments() == set()  # one failure is less than two in a row
    assert pauses.metrics() == {"env/a/paused": 0, "env/a/pauses": 0, "env/b/paused": 0, "env/b/pauses": 0}


def test_groups_that_were_started_before_the_pause_do_not_prolong_it(pauses):
    for _ in range(4):
        pauses.record_start("a")
    for _ in range(4):
        pauses.record_end("a", played("a"))
    assert pauses.seconds_left() == 10
    pauses.record_start("a")
    work(pauses, "a")
    assert pauses.held_environments() == set()


def test_inference_failures_do_not_pause_an_environment(pauses):
    fail(pauses, "a", 9, boundary="model")
    assert pauses.held_environments() == set()


def test_run_ends_at_once_if_no_rollout_has_worked(pauses):
    fail(pauses, "a", 2)
    pauses.check()
    fail(pauses, "b", 2)
    with pytest.raises(FinalRunError, match="it broke"):
        pauses.check()


def test_run_ends_if_the_first_groups_all_have_invalid_tasks(pauses):
    fail(pauses, "a", 1, boundary="task")
    pauses.check()
    fail(pauses, "a", 1, boundary="task")
    with pytest.raises(FinalRunError, match="it broke"):
        pauses.check()


def test_run_ends_at_the_first_group_with_an_invalid_configuration(pauses):
    fail(pauses, "a", 1, boundary="config")
    with pytest.raises(FinalRunError, match=r"no task can run: .*it broke"):
        pauses.check()


def test_one_invalid_task_before_a_scored_group_does_not_end_a_run(pauses):
    fail(pauses, "a", 1, boundary="task")
    work(pauses, "a")
    fail(pauses, "a", 1, boundary="task")
    pauses.check()


def test_an_invalid_task_of_a_working_environment_is_left_out(pauses, caplog):
    work(pauses, "a")
    fail(pauses, "a", 8, boundary="task")
    fail(pauses, "a", 1, boundary="config")
    pauses.check()
    assert pauses.held_environments() == set()
    assert caplog.text.count("it broke") == 9


def test_run_ends_after_give_up_seconds_of_failures(pauses, clock):
    work(pauses, "a")
    fail(pauses, "a", 2)
    clock.now += 50
    fail(pauses, "b", 2)
    clock.now += 99
    pauses.check()
    clock.now += 1
    with pytest.raises(FinalRunError, match=r"for 100 s; last error: .*it broke") as caught:
        pauses.check()
    assert caught.value.code == "BK-ENV-FAILED"


class Failing(LetterEnvironment):
    """Environment that fails while `broken`."""

    def __init__(self, name, **options):
        super().__init__(name, **options)
        self.broken = False
        self.fail = lambda task, attempt: self.broken


def collector(engine, environments, clock, *, batch_size=8, sizes=(4, 4), **changes):
    pauses = EnvironmentPauses([env.name for env in environments], SETTINGS, Path("run"), clock)
    return make_collector(engine, environments, sizes, pauses=pauses, batch_size=batch_size, **changes)


async def collect(c, engine, step, deterministic=None):
    engine.version = step
    c.set_version(step)
    if deterministic is not None:
        deterministic.begin(step)
    return await c.collect(step)


def of_batch(collected):
    return dict(Counter(g.rollouts[0].env_name for g in collected.groups))


@pytest.mark.parametrize("level", [0, 1])
async def test_other_environments_fill_batches_during_a_pause(clock, level):
    engine, a, b = FakeEngine(), Failing("a"), Failing("b")
    deterministic = DeterministicSampling(engine) if level == 0 else None
    c = collector(engine, [a, b], clock, deterministic=deterministic, level=level)
    seen = []
    for step in range(12):
        a.broken = 2 <= step < 7
        clock.now += 1000 if step == 8 else 1
        seen.append(of_batch(await collect(c, engine, step, deterministic)))
    metrics = c.metrics()
    await c.close()
    assert seen[0] == seen[1] == {"a": 1, "b": 1}
    assert seen[5] == seen[6] == {"b": 2}
    assert seen[11] == {"a": 1, "b": 1}
    assert metrics["env/a/passed_over"] > 0
    assert (metrics["env/a/paused"], metrics["env/b/paused"]) == (0, 0)
    assert sum(a.attempts.values()) < 4 * 12  # it was paused for a part of the time


async def test_run_waits_while_all_environments_are_paused(clock, monkeypatch):
    monkeypatch.setattr("buckeye.orchestrator.collector._POLL_SECONDS", 0.001)
    engine, a, b = FakeEngine(), Failing("a"), Failing("b")
    deterministic = DeterministicSampling(engine)  # synchronous: nothing is in flight between two batches
    c = collector(engine, [a, b], clock, deterministic=deterministic, level=0)
    await collect(c, engine, 0, deterministic)
    a.broken = b.broken = True
    waiting = asyncio.create_task(collect(c, engine, 1, deterministic))
    while c.metrics()["env/a/paused"] + c.metrics()["env/b/paused"] < 2:
        assert not waiting.done()
        await asyncio.sleep(0.001)
    a.broken = b.broken = False
    clock.now += 60
    batch = await waiting
    await c.close()
    assert of_batch(batch) == {"a": 1, "b": 1}


def test_groups_of_different_sizes_make_batches_of_at_least_the_size(clock):
    async def play():
        engine, a, b = FakeEngine(), LetterEnvironment("a"), LetterEnvironment("b")
        c = collector(engine, [a, b], clock, batch_size=10, sizes=(2, 5))
        batches = [await collect(c, engine, step) for step in range(4)]
        await c.close()
        return batches

    for batch in asyncio.run(play()):
        assert {g.rollouts[0].env_name: len(g.rollouts) for g in batch.groups} == {"a": 2, "b": 5}
        sizes = [len(g.rollouts) for g in batch.groups]
        assert sum(sizes) >= 10 > sum(sizes[:-1])


async def test_environment_metrics(clock):
    engine, a, b = FakeEngine(), Failing("a"), LetterEnvironment("b", turns=2)
    c = collector(engine, [a, b], clock)
    a.broken = True
    collected = await collect(c, engine, 0)
    await c.close()
    metrics = collected.environment_metrics()
    assert metrics["env/a/errored"] == metrics["env/a/errors/step"] > 0
    assert (metrics["env/a/share"], metrics["env/b/share"]) == (0.0, 1.0)
    assert "env/a/reward/played" not in metrics  # an errored rollout has no reward, so no mean includes it
    assert metrics["env/b/errored"] == 0
    assert metrics["env/b/turns/mean"] == 2
    assert metrics["env/b/completion_len/mean"] == 8


async def test_groups_of_held_environments_are_skipped(clock):
    engine, environments = FakeEngine(), [LetterEnvironment(name) for name in "abc"]
    c = collector(engine, environments, clock, batch_size=16, sizes=(4, 4, 4))
    fail(c._pauses, "a", 2)
    batches = [await collect(c, engine, step) for step in range(3)]
    await c.close()
    played = [g.index for batch in batches for g in batch.groups]
    turns = [c._sampler.environment_of(index).name for index in range(c._next_group)]
    assert c.metrics()["env/a/passed_over"] == turns.count("a")
    assert sorted(played) == [index for index in range(max(played) + 1) if turns[index] != "a"]
