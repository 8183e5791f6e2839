"""Every loss against hand-computed values: loss, gradient, and its masked or clipped fractions."""

import math

import pytest
import torch

from buckeye.trainer.losses.base import LossInputs
from buckeye.trainer.losses.policy_gradient import LOSS_TYPES
from tests.trainer.losses_by_hand import config_of, counts, inputs_of, loss_and_gradient, sums_of

LN2 = math.log(2.0)
MASKS = ("masked_low", "masked_high")
CLIPS = ("clipped_low", "clipped_high")


def test_masked_token_ratio():
    # ratios 1, 2, 0.1 (too low), 9 (too high); advantages 1, -1, 1, 1
    inputs = inputs_of([1.0, 2.0, 0.1, 9.0], [1.0, -1.0, 1.0, 1.0], [0, 0, 1, 1])
    assert counts(sums_of(inputs, "masked_ratio"), *MASKS) == [1, 1]
    loss, gradient = loss_and_gradient(inputs, "masked_ratio")
    assert loss == pytest.approx(-1.0 + 2.0)
    assert gradient == pytest.approx([-1.0, 2.0, 0.0, 0.0])  # d(-r A)/d log pi = -r A


PPO_RATIOS = [1.5, 1.5, 0.5, 0.5, 1.1]
PPO_ADVANTAGES = [1.0, -1.0, 1.0, -2.0, 3.0]


def test_ppo():
    inputs = inputs_of(PPO_RATIOS, PPO_ADVANTAGES)
    assert counts(sums_of(inputs, "ppo"), *CLIPS) == [1, 1]
    without = inputs_of([1.5, 0.5], [0.0, 0.0])  # without advantages the loss has no gradient
    assert counts(sums_of(without, "ppo"), *CLIPS) == [0, 0]
    loss, gradient = loss_and_gradient(inputs, "ppo")
    # clipped at 1.2; pessimistic 1.5; pessimistic 0.5; clipped at 0.8; inside
    assert loss == pytest.approx(-1.2 * 1 + 1.5 * 1 - 0.5 * 1 + 0.8 * 2 - 1.1 * 3)
    assert gradient == pytest.approx([0.0, 1.5, -0.5, 0.0, -3.3])


def test_gspo():
    # sequence 0: (1.2 * 0.9)^(1/2); sequence 1: 1.1^(1/1), clipped at 1.05 for its positive advantage
    mean = math.sqrt(1.2 * 0.9)
    inputs = inputs_of([1.2, 0.9, 1.1], [2.0, 2.0, 1.0], [0, 0, 1])
    assert counts(sums_of(inputs, "gspo", clip_low=0.05, clip_high=0.05), *CLIPS) == [0, 1]
    loss, gradient = loss_and_gradient(inputs, "gspo", clip_low=0.05, clip_high=0.05)
    assert loss == pytest.approx(-mean * 2.0 - 1.05)  # the mean of each sequence
    assert gradient == pytest.approx([-mean, -mean, 0.0])  # s A / |o|


def test_dr_grpo_is_ppo_with_another_normalization():
    found = [loss_and_gradient(inputs_of(PPO_RATIOS, PPO_ADVANTAGES), kind) for kind in ("dr_grpo", "ppo")]
    assert found[0] == found[1]


def test_cispo():
    # weights 1, 5 (clipped from 6), 0.5; the loss is -w A log pi
    inputs = inputs_of([1.0, 6.0, 0.5], [1.0, 2.0, -1.0])
    assert counts(sums_of(inputs, "cispo"), *CLIPS) == [0, 1]
    loss, gradient = loss_and_gradient(inputs, "cispo")
    expected = -1.0 * 1 * -1.0 - 5.0 * 2 * (-1.0 + math.log(6.0)) + 0.5 * 1 * (-1.0 - LN2)
    assert loss == pytest.approx(expected)
    assert gradient == pytest.approx([-1.0, -10.0, 0.5])


def test_cispo_clips_low_weights_up():
    inputs = inputs_of([0.5], [1.0])
    assert counts(sums_of(inputs, "cispo", clip_low=0.2), *CLIPS) == [1, 0]
    assert loss_and_gradient(inputs, "cispo", clip_low=0.2)[1] == pytest.approx([-0.8])


def test_reinforce():
    # -A log pi, independent of the sampler's log-probs
    loss, gradient = loss_and_gradient(inputs_of([1.0, 6.0], [1.0, -2.0]), "reinforce")
    assert loss == pytest.approx(-1.0 * -1.0 + 2.0 * (-1.0 + math.log(6.0)))
    assert gradient == pytest.approx([-1.0, 2.0])


def test_decoupled_ppo():
    # l = ln 1.5 for all tokens. Staleness 0: the proximal policy is the current one, u = 1, w = 1.5.
    # Staleness 1: it is the sampler, u = 1.5 is clipped at 1.2, w = 1. Staleness 2: half-way, u = w = sqrt
    # 1.5 = 1.2247. Staleness 4: u = 1.5^(1/4) = 1.1067 is inside, w = 1.5^(3/4).
    inputs = inputs_of([1.5] * 4, [1.0] * 4, staleness=[0, 1, 2, 4])
    assert counts(sums_of(inputs, "decoupled_ppo"), *CLIPS) == [0, 2]
    loss, gradient = loss_and_gradient(inputs, "decoupled_ppo")
    root = math.sqrt(1.5)
    assert loss == pytest.approx(-1.5 - 1.2 - root * 1.2 - 1.5)
    assert gradient == pytest.approx([-1.5, 0.0, 0.0, -1.5])


def test_decoupled_ppo_of_the_version_before_is_ppo():
    found = [
        loss_and_gradient(inputs_of(PPO_RATIOS, PPO_ADVANTAGES), kind) for kind in ("decoupled_ppo", "ppo")
    ]
    assert found[0][0] == pytest.approx(found[1][0])
    assert found[0][1] == pytest.approx(found[1][1])


ALL_TYPES = sorted(LOSS_TYPES)
LEAVE_OUT_EXTREME_RATIOS = ("masked_ratio", "ppo", "dr_grpo", "gspo", "decoupled_ppo")


@pytest.mark.parametrize("kind", ALL_TYPES)
def test_on_policy_all_losses_are_the_policy_gradient(kind):
    advantages = [1.0, 1.0, -0.5, -0.5, -0.5, 2.0]
    inputs = inputs_of([1.0] * 6, advantages, [0, 0, 1, 1, 1, 2])
    settings = {} if kind == "masked_ratio" else {"normalization": "token"}
    _, gradient = loss_and_gradient(inputs, kind, **settings)
    assert gradient == pytest.approx([-a for a in advantages])


@pytest.mark.parametrize("kind", ALL_TYPES)
def test_token_of_probability_zero_gives_a_finite_gradient(kind):
    """The sampler gave a probability of e^-1000 to a token that it sampled: its ratio is infinite."""
    inputs = LossInputs(
        logprobs=torch.tensor([-1.0, -1.0], requires_grad=True),
        entropies=torch.zeros(2),
        sampler_logprobs=torch.tensor([-1.0, -1000.0]),
        reference_logprobs=None,
        advantages=torch.ones(2),
        sequences=torch.tensor([0, 1]),
        staleness=torch.ones(2, dtype=torch.long),
    )
    loss, gradient = loss_and_gradient(inputs, kind)
    assert math.isfinite(loss)
    assert gradient[0] == pytest.approx(-1.0)
    assert math.isfinite(gradient[1])
    if kind in LEAVE_OUT_EXTREME_RATIOS:
        assert gradient[1] == 0.0


@pytest.mark.parametrize("kind", ALL_TYPES)
def test_no_tokens(kind):
    inputs = inputs_of([], [], [])
    settings = {} if kind == "masked_ratio" else {"correction": {"type": "mask", "level": "sequence"}}
    loss, gradient = loss_and_gradient(inputs, kind, **settings)
    assert (loss, gradient) == (0.0, [])


@pytest.mark.parametrize("kind", ALL_TYPES)
def test_nan_logprob_gives_a_nan_loss(kind):
    inputs = inputs_of([1.0, math.nan], [1.0, 1.0])
    assert math.isnan(sums_of(inputs, kind).loss.item())


def test_settings_have_the_defaults_of_the_functions():
    for kind, loss in LOSS_TYPES.items():
        config = config_of(kind)
        for name, default in (loss.function.__kwdefaults__ or {}).items():
            assert getattr(config, name) == default, (kind, name)
