"""The settings of losses: by `type`, or the default's by themselves."""

import pytest

from buckeye.config.losses import (
    CISPOLossConfig,
    CustomLossConfig,
    DecoupledPPOLossConfig,
    DPPOLossConfig,
    DrGRPOLossConfig,
    GSPOLossConfig,
    MaskCorrectionConfig,
    MaskedRatioLossConfig,
    PPOLossConfig,
    ReinforceLossConfig,
    TruncateCorrectionConfig,
)
from buckeye.config.rl import RLConfig
from buckeye.config.trainer import TrainerConfig


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", MaskedRatioLossConfig()),
        ("--loss.mask-ratio-high 4", MaskedRatioLossConfig(mask_ratio_high=4)),
        ("--loss.type ppo --loss.clip-high 0.28", PPOLossConfig(clip_high=0.28)),
        ("--loss.type dr_grpo", DrGRPOLossConfig(normalization="constant")),
        ("--loss.type gspo", GSPOLossConfig(normalization="sequence")),
        ("--loss.type cispo", CISPOLossConfig()),
        ("--loss.type reinforce", ReinforceLossConfig()),
        ("--loss.type dppo --loss.kl-tau 0", DPPOLossConfig(kl_tau=0)),
        (
            "--loss.type decoupled_ppo --loss.correction",
            DecoupledPPOLossConfig(correction=TruncateCorrectionConfig()),
        ),
        (
            "--loss.type ppo --loss.correction.type mask --loss.correction.low 0.1",
            PPOLossConfig(correction=MaskCorrectionConfig(low=0.1)),
        ),
        (
            "--loss.type custom --loss.import-path a.b:c --loss.kwargs.beta 2",
            CustomLossConfig(import_path="a.b:c", kwargs={"beta": 2}),
        ),
    ],
)
def test_losses_by_flags(load, words, expected):
    assert load(TrainerConfig, words).loss == expected


def test_a_recipe_sets_both_sides_and_what_is_said_stands(load):
    words = "--trainer --orchestrator --inference --orchestrator.rollouts-per-example 8"
    grpo = load(RLConfig, f"{words} --trainer.loss.type grpo")
    assert grpo.trainer.loss.kl_coef == 0.04
    assert grpo.trainer.loss.normalization == "sequence"
    assert grpo.orchestrator.advantage.std_norm == "local"
    dapo = load(RLConfig, f"{words} --trainer.loss.type dapo")
    assert (dapo.trainer.loss.clip_low, dapo.trainer.loss.clip_high) == (0.2, 0.28)
    assert (dapo.orchestrator.zero_spread, dapo.orchestrator.advantage.std_norm) == ("drop", "local")
    said = load(
        RLConfig,
        f"{words} --trainer.loss.type dapo --trainer.loss.clip-high 0.3 --orchestrator.zero-spread keep "
        "--orchestrator.advantage.type max_rl",
    )
    assert said.trainer.loss.clip_high == 0.3
    assert said.orchestrator.zero_spread == "keep"
    assert said.orchestrator.advantage.type == "max_rl"
    assert load(RLConfig, f"{words} --trainer.loss.type rloo").orchestrator.advantage.leave_one_out
    assert load(RLConfig, words).orchestrator.advantage.std_norm is None


def test_a_loss_in_a_file(load, folder):
    folder.write("t.toml", '[loss]\ntype = "ppo"\ncorrection = {type = "mask", level = "sequence"}\n')
    assert load(TrainerConfig, "@ t.toml").loss.correction == MaskCorrectionConfig(level="sequence")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--loss.type grpa", "--loss.type"),
        ("--loss.clip-high 0.3", "--loss.clip-high"),
        ("--loss.type ppo --loss.mask-ratio-low 0.3", "--loss.mask-ratio-low"),
        ("--loss.correction.high 3", "--loss.correction"),
        ("--loss.type ppo --loss.correction.low 0.3", "--loss.correction.low"),
        ("--loss.type ppo --loss.correction.type mask --loss.correction.high 0.5", "low = 0.5 is not below"),
        ("--loss.mask-ratio-low 9", "mask_ratio_low = 9 is not below mask_ratio_high = 8"),
        ("--loss.type ppo --loss.dual-clip 1", "--loss.dual-clip"),
        ("--loss.reference-model m", "reference_model has no effect with kl_coef = 0"),
        ("--loss.type ppo --loss.normalization-length 9", "no effect with normalization = "),
        ("--loss.type reinforce --loss.correction.high 3", "reinforce has no importance weights to truncate"),
        ("--loss.type custom", "--loss.import-path"),
        ("--loss.type custom --loss.import-path my_loss.py", "import_path = 'my_loss.py' names no function"),
    ],
)
def test_settings_of_another_loss_are_refused(refused, words, message):
    assert message in refused(TrainerConfig, words)
