"""Shaping, advantages and filters: valid combinations, from files and flags."""

import pytest

from buckeye.config.buffer import OnlineDifficultyBufferConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rewards import GroupAdvantageConfig, MaxRLAdvantageConfig, TurnAdvantageConfig


def test_the_type_of_advantage_may_be_left_out(load):
    assert load(OrchestratorConfig, "").advantage == GroupAdvantageConfig()
    assert load(OrchestratorConfig, "--advantage.std-norm local").advantage == GroupAdvantageConfig(
        std_norm="local"
    )
    assert load(OrchestratorConfig, "--advantage None").advantage is None
    assert load(OrchestratorConfig, "--advantage.type max_rl").advantage == MaxRLAdvantageConfig()
    by_turn = load(OrchestratorConfig, "--advantage.type turn --advantage.discount 0.9").advantage
    assert by_turn == TurnAdvantageConfig(discount=0.9)


def test_shaping_by_stop_reason(load):
    words = "--reward-shaping.stop-reason-rewards.length -0.5"
    words += " --reward-shaping.stop-reason-penalties.turn_limit 0.2"
    shaping = load(OrchestratorConfig, words).reward_shaping
    assert shaping.stop_reason_rewards == {"length": -0.5}
    assert shaping.stop_reason_penalties == {"turn_limit": 0.2}


SHAPING = [
    *("length-penalty 0.1", "overlong-cache 10", "overlong-penalty 0.5", "max-length 50"),
    "overlong-cache 10 --sampling.max-tokens 9",
    "stop-reason-rewards.a 0 --reward-shaping.stop-reason-penalties.a 1",
    "stop-reason-penalties.a 1 --zero-truncated-completions",
]
BELOW_ZERO = [
    *("length-penalty 0.1", "overlong-cache 10"),
    *("stop-reason-rewards.length -0.5", "stop-reason-penalties.length 0.5"),
]


@pytest.mark.parametrize(
    "words",
    [
        "--advantage.type max_rl --advantage.std-norm local",
        "--advantage.type turn --advantage.discount 1.5",
        *(f"--reward-shaping.{words}" for words in SHAPING),
        *(
            f"--advantage.type max_rl --sampling.max-tokens 99 --reward-shaping.{words}"
            for words in BELOW_ZERO
        ),
    ],
)
def test_conflicting_reward_settings_are_refused(refused, words, wording):
    assert refused(OrchestratorConfig, words) == wording


def test_max_rl_accepts_shaping_that_stays_above_zero(load):
    words = "--advantage.type max_rl --reward-shaping.stop-reason-rewards.length 0.25"
    assert load(OrchestratorConfig, words).advantage == MaxRLAdvantageConfig()


def test_online_difficulty_limits_are_set(load):
    words = "--buffer.type online-difficulty --buffer.max-reward 0.9"
    config = load(OrchestratorConfig, words)
    assert config.buffer == OnlineDifficultyBufferConfig(max_reward=0.9)
