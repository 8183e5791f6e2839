"""Shaping, advantages and filters: valid combinations, from files and flags."""

import pytest

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rewards import GroupAdvantageConfig, TurnAdvantageConfig


def test_the_type_of_advantage_may_be_left_out(load):
    assert load(OrchestratorConfig, "").advantage == GroupAdvantageConfig()
    assert load(OrchestratorConfig, "--advantage.std-norm local").advantage == GroupAdvantageConfig(
        std_norm="local"
    )
    assert load(OrchestratorConfig, "--advantage None").advantage is None
    by_turn = load(OrchestratorConfig, "--advantage.type turn --advantage.discount 0.9").advantage
    assert by_turn == TurnAdvantageConfig(discount=0.9)


SHAPING = [
    *("overlong-cache 10", "overlong-penalty 0.5", "max-length 50"),
    "overlong-cache 10 --sampling.max-tokens 9",
]


@pytest.mark.parametrize(
    "words",
    [
        "--advantage.type turn --advantage.discount 1.5",
        *(f"--reward-shaping.{words}" for words in SHAPING),
    ],
)
def test_conflicting_reward_settings_are_refused(refused, words, wording):
    assert refused(OrchestratorConfig, words) == wording
