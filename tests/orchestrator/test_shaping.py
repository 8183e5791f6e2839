"""Reward shaping compared with hand-computed numbers; the raw reward stays unchanged."""

import asyncio

import pytest

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.base import Outcome, Task
from buckeye.errors import UsageError
from buckeye.inference.client import SamplingParams
from buckeye.orchestrator.advantages import Scored, overlong_amount, reward_shaping
from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.task_sampler import GroupTask

from .fakes import FakeEngine, LetterEnvironment, make_runner


def amounts(reward=1.0, stop_reason="answered", truncated=False, tokens=50, turns=None, **settings):
    config = OrchestratorConfig(sampling={"max_tokens": 100}, reward_shaping=settings)
    return reward_shaping(config).amounts(
        Scored(
            reward=reward,
            turn_rewards=[reward],
            turn_lengths=turns or [tokens],
            task=Task(id="t", messages=()),
            replies=["no"],
            stop_reason=stop_reason,
            truncated=truncated,
        )
    )


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (130, -1.0)]
)
def test_soft_overlong_punishment(length, expected):
    assert overlong_amount(length, 100, 20) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tokens", "settings", "expected"),
    [
        (90, {"overlong_cache": 20, "overlong_penalty": 0.4}, {"overlong": -0.2}),
        (45, {"overlong_cache": 20, "max_length": 50}, {"overlong": -0.75}),
        (0, {"length_penalty": 0.2}, {"length": 0.0}),
        (50, {"length_penalty": 0.2}, {"length": -0.1}),
        (100, {"length_penalty": 0.2}, {"length": -0.2}),
        (50, {}, {}),
    ],
)
def test_penalties_of_length(tokens, settings, expected):
    assert amounts(tokens=tokens, **settings) == pytest.approx(expected)
    assert reward_shaping(OrchestratorConfig()) is None


def test_length_of_rollout_or_longest_reply(refusal):
    turns = {"turns": [30, 50, 10], "length_penalty": 0.2}
    assert amounts(**turns) == {"length": pytest.approx(-0.2 * 0.9)}
    assert amounts(**turns, length_of="reply") == {"length": pytest.approx(-0.2 * 0.5)}
    assert amounts(turns=[30, 90], overlong_cache=20, length_of="reply") == {"overlong": pytest.approx(-0.5)}
    with refusal(ValueError):
        amounts(length_of="reply")


@pytest.mark.parametrize(("tokens", "both"), [(50, -0.2), (82, -0.328), (90, -0.5), (100, -1.0)])
def test_a_long_rollout_is_not_punished_twice(tokens, both):
    """Only the larger penalty counts: 0.4 of the length, or from 80 tokens on the one that rises to 1."""
    found = amounts(tokens=tokens, length_penalty=0.4, overlong_cache=20)
    assert sum(found.values()) == pytest.approx(both)
    assert all(amount <= 0.0 for amount in found.values())


def test_a_stop_reason_replaces_the_reward_or_subtracts_from_it():
    settings = {"stop_reason_rewards": {"length": -0.5}, "stop_reason_penalties": {"turn_limit": 0.2}}
    assert amounts(0.25, stop_reason="turn_limit", **settings) == {"stop_reason": -0.2}
    assert amounts(0.25, stop_reason="answered", **settings) == {"stop_reason": 0.0}
    assert amounts(0.25, stop_reason="answered", truncated=True, **settings) == {"stop_reason": -0.75}
    assert amounts(0.25, stop_reason="length", **settings) == {"stop_reason": -0.75}
    assert amounts(1.0, stop_reason="turn_limit", truncated=True, **settings) == {"stop_reason": -0.2}


def play(engine, config, environment, *, as_group=False):
    params = SamplingParams(max_tokens=2)
    player = make_runner(engine, params=params, seed=7, shaping=reward_shaping(config))
    named = NamedEnvironment(name=environment.name, environment=environment)
    task = environment.tasks("train")[0]

    async def one():
        if as_group:
            return (await player.start_group(GroupTask(index=0, env=named, task=task), 1)).rollouts[0]
        return await player.start(named, task, 0)

    return asyncio.run(one())


class CutOff(FakeEngine):
    """Engine whose replies are all cut off after two tokens."""

    def _answer(self, seed, max_tokens):
        answer = super()._answer(seed, max_tokens)
        return type(answer)(
            token_ids=answer.token_ids[:2],
            logprobs=answer.logprobs[:2],
            versions=answer.versions[:2],
            finish_reason="length",
        )


class Pays(LetterEnvironment):
    """Environment of two turns with the given reward and turn rewards."""

    def __init__(self, reward, turn_rewards=None, turns=2):
        super().__init__(turns=turns)
        self.paid = (reward, turn_rewards)

    async def rollout(self, task, policy):
        await super().rollout(task, policy)
        return Outcome(reward=self.paid[0], turn_rewards=self.paid[1])


class PaysTogether(Pays):
    """Environment whose rewards are known only after the whole group has run."""

    async def rollout_in_group(self, task, policy):
        await LetterEnvironment.rollout(self, task, policy)
        return Outcome(reward=None, pending="a rollout")

    async def finish_group(self, task, outcomes):
        return [Outcome(reward=self.paid[0]) for _ in outcomes]


def test_group_scored_reward_is_shaped_once():
    config = OrchestratorConfig(zero_truncated_completions=True)
    cut = play(CutOff(), config, PaysTogether(1.0), as_group=True)
    assert (cut.reward, cut.shaped_reward, cut.shaping) == (1.0, 0.0, {"stop_reason": -1.0})


def test_truncated_rollouts_can_have_shaped_reward_zero():
    config = OrchestratorConfig(zero_truncated_completions=True)
    cut = play(CutOff(), config, Pays(1.0))
    assert (cut.reward, cut.shaped_reward, cut.shaping) == (1.0, 0.0, {"stop_reason": -1.0})
    whole = play(FakeEngine(), config, Pays(1.0))
    assert (whole.reward, whole.shaped_reward, whole.shaping) == (1.0, 1.0, {"stop_reason": 0.0})


def test_shaping_is_added_to_the_last_turn():
    config = OrchestratorConfig(reward_shaping={"length_penalty": 0.5, "max_length": 8})
    cut = play(CutOff(), config, Pays(1.0, [0.75, 0.25])).as_scored()  # 4 tokens of 8
    assert cut.turn_rewards == pytest.approx([0.75, 0.0])
    assert cut.reward == pytest.approx(0.75)
    assert cut.turn_lengths == [2, 2]


def test_reward_without_turn_rewards_goes_to_the_last_turn():
    assert play(FakeEngine(), OrchestratorConfig(), Pays(1.0)).as_scored().turn_rewards == [0.0, 1.0]


def test_reward_of_a_turn_without_room_goes_to_the_turn_before():
    class Long(Pays):
        async def rollout(self, task, policy):
            first = await policy.chat(task.messages)
            await policy.chat([*task.messages, first.message, {"role": "user", "content": "x" * 80}])
            return Outcome(reward=1.0, turn_rewards=[0.25, 0.75])

    played = play(FakeEngine(), OrchestratorConfig(), Long(1.0))
    assert played.turns == 1
    assert played.as_scored().turn_rewards == [1.0]


OWN_SHAPING = """
def said(rollout, *, word, pays):
    task, replies, components = rollout.task.id, rollout.replies, rollout.components
    return pays * sum(word in reply for reply in replies) + components.get("style", 0.0)

def never(rollout):
    return float("nan")

def raises(rollout):
    return rollout.reward / 0
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_shaping.py"
    path.write_text(OWN_SHAPING)

    def config(name, **kwargs):
        return OrchestratorConfig(
            reward_shaping={"function": {"import_path": f"{path}:{name}", "kwargs": kwargs}}
        )

    return config


class Styled(LetterEnvironment):
    async def rollout(self, task, policy):
        await super().rollout(task, policy)
        return Outcome(reward=1.0, components={"style": 0.5})


def test_shaping_function_gets_replies_and_components(own):
    played = play(FakeEngine(), own("said", word="", pays=0.25), Styled(turns=2))
    assert len(played.replies) == 2
    assert played.shaping == {"function": 0.25 * 2 + 0.5}
    assert (played.reward, played.shaped_reward) == (1.0, 2.0)
    absent = play(FakeEngine(), own("said", word="no such word", pays=9.0), Styled(turns=2))
    assert absent.shaping == {"function": 0.5}


@pytest.mark.parametrize(("name", "what"), [("never", "is nan, which"), ("raises", "ZeroDivisionError")])
def test_failing_shaping_function_makes_the_rollout_errored(own, name, what):
    played = play(FakeEngine(), own(name), Styled(turns=2))
    assert played.reward is None
    assert what in played.outcome.error


def test_missing_shaping_function_is_refused_before_the_run(own):
    with pytest.raises(UsageError, match=r"orchestrator.reward_shaping.function.import_path.*no function"):
        reward_shaping(own("absent"))
