"""Reward shaping against numbers computed by hand, and that the raw reward stays what it was."""

import asyncio

import pytest

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.base import Outcome
from buckeye.inference.client import SamplingParams
from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.rollout import RolloutPlayer
from buckeye.orchestrator.shaping import overlong_amount, reward_shaping

from .fakes import FakeEngine, LetterEnvironment, LetterRenderer


def amounts(reward=1.0, stop_reason="answered", truncated=False, tokens=50, **settings):
    config = OrchestratorConfig(sampling={"max_tokens": 100}, reward_shaping=settings)
    return reward_shaping(config).amounts(
        reward, stop_reason=stop_reason, truncated=truncated, completion_tokens=tokens
    )


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (130, -1.0)]
)
def test_soft_overlong_punishment(length, expected):
    assert overlong_amount(length, 100, 20) == pytest.approx(expected)


def test_overlong_penalty_has_a_size():
    assert amounts(tokens=90, overlong_cache=20, overlong_penalty=0.4) == {"overlong": pytest.approx(-0.2)}
    assert amounts(tokens=45, overlong_cache=20, max_length=50) == {"overlong": pytest.approx(-0.75)}


def test_length_penalty_is_linear():
    assert amounts(tokens=0, length_penalty=0.2) == {"length": 0.0}
    assert amounts(tokens=50, length_penalty=0.2) == {"length": pytest.approx(-0.1)}
    assert amounts(tokens=100, length_penalty=0.2) == {"length": pytest.approx(-0.2)}


def test_a_stop_reason_replaces_the_reward_or_subtracts_from_it():
    settings = {"stop_reason_rewards": {"length": -0.5}, "stop_reason_penalties": {"turn_limit": 0.2}}
    assert amounts(0.25, stop_reason="turn_limit", **settings) == {"stop_reason": -0.2}
    assert amounts(0.25, stop_reason="answered", **settings) == {"stop_reason": 0.0}
    assert amounts(0.25, stop_reason="answered", truncated=True, **settings) == {"stop_reason": -0.75}
    assert amounts(0.25, stop_reason="length", **settings) == {"stop_reason": -0.75}


def test_the_environment_s_own_reason_goes_before_length():
    settings = {"stop_reason_rewards": {"length": -0.5}, "stop_reason_penalties": {"turn_limit": 0.2}}
    assert amounts(1.0, stop_reason="turn_limit", truncated=True, **settings) == {"stop_reason": -0.2}


def test_nothing_is_shaped_unless_asked():
    assert reward_shaping(OrchestratorConfig()) is None
    assert amounts() == {}


def play(engine, config, environment):
    player = RolloutPlayer(
        sampler=engine,
        renderer=LetterRenderer(),
        params=SamplingParams(max_tokens=2),
        seq_len=64,
        seed=7,
        timeout=5.0,
        retries=0,
        shaping=reward_shaping(config),
    )
    named = NamedEnvironment(name=environment.name, environment=environment)

    async def one():
        return await player.start(named, environment.tasks("train")[0], 0)

    return asyncio.run(one())


class CutOff(FakeEngine):
    """Every reply is two tokens long and cut off."""

    def _answer(self, seed, max_tokens):
        answer = super()._answer(seed, max_tokens)
        return type(answer)(
            token_ids=answer.token_ids[:2],
            logprobs=answer.logprobs[:2],
            versions=answer.versions[:2],
            finish_reason="length",
        )


class Pays(LetterEnvironment):
    """Two turns; pays what it is told, in all and by turn."""

    def __init__(self, reward, turn_rewards=None, turns=2):
        super().__init__(turns=turns)
        self.paid = (reward, turn_rewards)

    async def rollout(self, task, policy):
        await super().rollout(task, policy)
        return Outcome(reward=self.paid[0], turn_rewards=self.paid[1])


def test_truncated_rollouts_can_be_worth_nothing_and_their_raw_reward_is_kept():
    config = OrchestratorConfig(zero_truncated_completions=True)
    cut = play(CutOff(), config, Pays(1.0))
    assert (cut.reward, cut.shaped_reward, cut.shaping) == (1.0, 0.0, {"stop_reason": -1.0})
    whole = play(FakeEngine(), config, Pays(1.0))
    assert (whole.reward, whole.shaped_reward, whole.shaping) == (1.0, 1.0, {"stop_reason": 0.0})


def test_shaping_is_paid_at_the_last_turn():
    config = OrchestratorConfig(reward_shaping={"length_penalty": 0.5, "max_length": 8})
    cut = play(CutOff(), config, Pays(1.0, [0.75, 0.25])).as_scored()  # 4 tokens of 8
    assert cut.turn_rewards == pytest.approx([0.75, 0.0])
    assert cut.reward == pytest.approx(0.75)
    assert cut.turn_lengths == [2, 2]


def test_a_reward_that_is_not_by_turn_is_the_last_turn_s():
    assert play(FakeEngine(), OrchestratorConfig(), Pays(1.0)).as_scored().turn_rewards == [0.0, 1.0]


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        (Pays(float("nan")), "the reward is nan"),
        (Pays(1.0, [1.0]), "turn_rewards has 1 entries; there were 2 turns"),
        (Pays(1.0, [0.0, 0.0, 1.0]), "turn_rewards has 3 entries; there were 2 turns"),
        (Pays(1.0, [0.0, 0.5]), "turn_rewards add up to 0.5 and reward is 1"),
    ],
)
def test_rewards_that_cannot_be_are_errors(environment, what):
    rollout = play(FakeEngine(), OrchestratorConfig(zero_truncated_completions=True), environment)
    assert what in rollout.outcome.error
    assert (rollout.reward, rollout.shaped_reward) == (None, None)


def test_a_turn_without_room_pays_with_the_turn_before_it():
    class Long(Pays):
        async def rollout(self, task, policy):
            first = await policy.chat(task.messages)
            await policy.chat([*task.messages, first.message, {"role": "user", "content": "x" * 80}])
            return Outcome(reward=1.0, turn_rewards=[0.25, 0.75])

    played = play(FakeEngine(), OrchestratorConfig(), Long(1.0))
    assert played.turns == 1
    assert played.as_scored().turn_rewards == [1.0]
