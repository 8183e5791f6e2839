"""Settings of losses: selected by `type`, or without it those of the default loss."""

import pytest

from buckeye.config.losses import MaskCorrectionConfig
from buckeye.config.rl import RLConfig
from buckeye.config.trainer import TrainerConfig


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--loss.mask-ratio-high 4",
        "--loss.type ppo --loss.clip-high 0.28",
        "--loss.type dr_grpo",
        "--loss.type gspo",
        "--loss.type cispo",
        "--loss.type reinforce",
        "--loss.type decoupled_ppo --loss.correction",
        "--loss.type ppo --loss.correction.type mask --loss.correction.low 0.1",
        "--loss.type custom --loss.import-path a.b:c --loss.kwargs.beta 2",
    ],
)
def test_losses_by_flags(load, words, wording):
    assert load(TrainerConfig, words).loss.model_dump() == wording


def test_recipe_sets_trainer_and_orchestrator_unless_set_explicitly(load):
    words = "--trainer --orchestrator --inference --orchestrator.rollouts-per-example 8"
    grpo = load(RLConfig, f"{words} --trainer.loss.type grpo")
    assert grpo.trainer.loss.kl_coef == 0.04
    assert grpo.trainer.loss.normalization == "sequence"
    assert grpo.orchestrator.advantage.std_norm == "local"
    dapo = load(RLConfig, f"{words} --trainer.loss.type dapo")
    assert (dapo.trainer.loss.clip_low, dapo.trainer.loss.clip_high) == (0.2, 0.28)
    assert (dapo.orchestrator.zero_spread, dapo.orchestrator.advantage.std_norm) == ("drop", "local")
    explicit = load(
        RLConfig,
        f"{words} --trainer.loss.type dapo --trainer.loss.clip-high 0.3 --orchestrator.zero-spread keep "
        "--orchestrator.advantage.type turn",
    )
    assert explicit.trainer.loss.clip_high == 0.3
    assert explicit.orchestrator.zero_spread == "keep"
    assert explicit.orchestrator.advantage.type == "turn"
    assert load(RLConfig, f"{words} --trainer.loss.type rloo").orchestrator.advantage.leave_one_out
    assert load(RLConfig, f"{words} --trainer.loss.type ppo").max_async_level is None
    assert load(RLConfig, words).orchestrator.advantage.std_norm is None


@pytest.mark.parametrize("loss", ["reinforce", "rloo"])
@pytest.mark.parametrize(
    ("words", "level"),
    [
        ("", 0),
        ("--max-async-level 2", 2),
        ("--orchestrator.max-async-level 2", 2),
        ("--trainer.max-async-level 1", 1),
    ],
)
def test_losses_without_a_ratio_are_synchronous_unless_the_user_sets_a_level(load, loss, words, level):
    config = load(
        RLConfig, f"--trainer --orchestrator --inference --trainer.loss.type {loss} {words} --model.name m"
    )
    assert (config.orchestrator.max_async_level, config.trainer.max_async_level) == (level, level)
    assert len(list(config.trainer.warnings())) == (level > 0)


def test_a_loss_in_a_file(load, folder):
    folder.write("t.toml", '[loss]\ntype = "ppo"\ncorrection = {type = "mask", level = "sequence"}\n')
    assert load(TrainerConfig, "@ t.toml").loss.correction == MaskCorrectionConfig(level="sequence")


@pytest.mark.parametrize(
    "words",
    [
        "--loss.type grpa",
        "--loss.clip-high 0.3",
        "--loss.type ppo --loss.mask-ratio-low 0.3",
        "--loss.correction.high 3",
        "--loss.type ppo --loss.correction.low 0.3",
        "--loss.type ppo --loss.correction.type mask --loss.correction.high 0.5",
        "--loss.mask-ratio-low 9",
        "--loss.reference-model m",
        "--loss.type ppo --loss.normalization-length 9",
        "--loss.type reinforce --loss.correction.high 3",
        "--loss.type custom",
        "--loss.type custom --loss.import-path my_loss.py",
    ],
)
def test_invalid_loss_settings_are_refused(refused, words, wording):
    assert refused(TrainerConfig, words) == wording
