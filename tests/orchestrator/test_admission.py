"""Limits, sampling settings and time limits per environment."""

import asyncio
import contextlib

import pytest

from buckeye.inference.client import InferenceClient
from buckeye.orchestrator.deterministic_sampling import DeterministicSampling
from buckeye.orchestrator.environments import NamedEnvironment, RolloutSettings
from buckeye.orchestrator.rate_limits import Admission

from .fakes import FakeEngine, LetterEnvironment, make_runner

pytestmark = pytest.mark.anyio


class Busy(LetterEnvironment):
    """Environment that counts how many of its rollouts run at once."""

    now = most = 0

    async def rollout(self, task, policy):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await super().rollout(task, policy)
        finally:
            self.now -= 1


async def play(player, env, count):
    task = env.environment.tasks("train")[0]
    return await asyncio.gather(*(player.start(env, task, i) for i in range(count)))


async def test_max_concurrent_is_per_environment():
    engine, slow, fast = FakeEngine(delay=0.001), Busy("slow"), Busy("fast")
    envs = [
        NamedEnvironment(name="slow", environment=slow, admission=Admission(max_concurrent=2)),
        NamedEnvironment(name="fast", environment=fast),
    ]
    shared = make_runner(engine, max_concurrent=5)
    await asyncio.gather(*(play(shared, env, 12) for env in envs))
    assert slow.most == 2
    assert 3 <= fast.most <= 5  # rollouts that wait for the slow environment hold none of the five slots


class OneByOne(InferenceClient):
    """Engine client with a slot for one rollout at a time, free again after a tenth of a second."""

    def __init__(self):
        self.engine, self.turn = FakeEngine(), asyncio.Lock()

    def session(self):
        return self.engine

    async def wait_for_slot(self):
        async with self.turn:
            await asyncio.sleep(0.1)


def test_waiting_for_a_slot_does_not_count_as_rollout_time():
    env = NamedEnvironment(name="busy", environment=Busy("busy"))
    rollouts = asyncio.run(play(make_runner(OneByOne(), timeout=0.5), env, 12))
    assert [rollout.outcome.error for rollout in rollouts] == [None] * 12


def test_starts_are_spread_evenly():
    now, starts = 0.0, []

    async def sleep(seconds):
        starts.append(now + seconds)

    async def start(admission, count):
        for _ in range(count):
            async with contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(admission.slot())

    admission = Admission(rate_limit=4.0, clock=lambda: now, sleep=sleep)
    asyncio.run(start(admission, 4))
    assert starts == [0.25, 0.5, 0.75]  # the first starts immediately
    now = 10.0
    asyncio.run(start(admission, 1))
    assert len(starts) == 3  # idle time gives no extra starts


@pytest.mark.parametrize("wave", [False, True])
async def test_environment_overrides_temperature_length_and_timeout(wave):
    engine = FakeEngine(delay=0.0)
    own = RolloutSettings(temperature=0.5, max_tokens=3, timeout=0.01)
    environment = LetterEnvironment(sleep=0.5)
    deterministic = DeterministicSampling(engine) if wave else None
    if deterministic is not None:
        deterministic.begin(0)
    (rollout,) = await play(
        make_runner(deterministic or engine),
        NamedEnvironment(name="own", environment=environment, rollout_settings=own),
        1,
    )
    (_, params), *_ = engine.waves if wave else engine.calls
    assert (params.temperature, params.max_tokens) == (0.5, 3)
    assert rollout.temperature == 0.5
    assert rollout.outcome.boundary == "timeout"
    assert "within 0.01 s" in rollout.outcome.error
