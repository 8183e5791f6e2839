"""Shaping, advantages and filters: what goes together, from files and flags."""

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


def test_an_option_of_another_type_is_refused(refused):
    assert "std_norm" in refused(
        OrchestratorConfig, "--advantage.type max_rl --advantage.std-norm local"
    ).replace("-", "_")
    assert "--advantage.discount" in refused(
        OrchestratorConfig, "--advantage.type turn --advantage.discount 1.5"
    )


def test_shaping_by_stop_reason(load):
    words = "--reward-shaping.stop-reason-rewards.length -0.5"
    words += " --reward-shaping.stop-reason-penalties.turn_limit 0.2"
    shaping = load(OrchestratorConfig, words).reward_shaping
    assert shaping.stop_reason_rewards == {"length": -0.5}
    assert shaping.stop_reason_penalties == {"turn_limit": 0.2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--reward-shaping.length-penalty 0.1", "set reward_shaping.max_length or sampling.max_tokens"),
        ("--reward-shaping.overlong-cache 10", "set reward_shaping.max_length or sampling.max_tokens"),
        (
            "--reward-shaping.overlong-cache 10 --sampling.max-tokens 9",
            "overlong_cache = 10 is more than the longest rollout, 9 tokens",
        ),
        (
            "--reward-shaping.stop-reason-rewards.a 0 --reward-shaping.stop-reason-penalties.a 1",
            "both name a: either replace the reward, or subtract from it",
        ),
        (
            "--zero-truncated-completions --reward-shaping.stop-reason-penalties.a 1",
            "set length = 0.0 in reward_shaping.stop_reason_rewards",
        ),
        ("--reward-shaping.overlong-penalty 0.5", "overlong_penalty has no effect without overlong_cache"),
        (
            "--reward-shaping.max-length 50",
            "max_length has no effect without overlong_cache or length_penalty",
        ),
        *(
            (
                f"--advantage.type max_rl --sampling.max-tokens 99 --reward-shaping.{words}",
                "rewards of 0 or more",
            )
            for words in (
                "length-penalty 0.1",
                "overlong-cache 10",
                "stop-reason-rewards.length -0.5",
                "stop-reason-penalties.length 0.5",
            )
        ),
    ],
)
def test_shaping_that_cannot_be(refused, words, said):
    assert said in refused(OrchestratorConfig, words)


def test_shaping_that_stays_above_zero_goes_with_max_rl(load):
    words = "--advantage.type max_rl --reward-shaping.stop-reason-rewards.length 0.25"
    assert load(OrchestratorConfig, words).advantage == MaxRLAdvantageConfig()


def test_difficulty_borders(load):
    words = "--buffer.type online-difficulty --buffer.max-reward 0.9"
    config = load(OrchestratorConfig, words)
    assert config.buffer == OnlineDifficultyBufferConfig(max_reward=0.9)
