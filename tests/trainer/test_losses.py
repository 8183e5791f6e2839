"""Losses against numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from buckeye.trainer.losses import RatioLimits, sequence_ratio_loss, token_ratio_loss

LIMITS = RatioLimits(low=0.125, high=8.0, sequence_low=0.0)
LN2 = math.log(2.0)


def _tensors(ratios, advantages, sequences):
    sampler = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    logprobs = (sampler + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    return logprobs, sampler, torch.tensor(advantages, dtype=torch.float64), torch.tensor(sequences)


def test_token_ratio_by_hand():
    # ratios 1, 2, 0.1 (too low), 9 (too high); advantages 1, -1, 1, 1
    inputs = _tensors([1.0, 2.0, 0.1, 9.0], [1.0, -1.0, 1.0, 1.0], [0, 0, 1, 1])
    sums = token_ratio_loss(*inputs, limits=LIMITS, kl_tau=0.0, kl_mask="all")
    assert sums.loss.item() == pytest.approx(-1.0 + 2.0)
    assert (sums.masked_low.item(), sums.masked_high.item(), sums.masked_sequence.item()) == (1, 1, 0)
    kl = (2 - LN2 - 1) + (0.1 - math.log(0.1) - 1) + (9 - math.log(9) - 1)
    assert sums.mismatch_kl.item() == pytest.approx(kl)
    sums.loss.backward()
    # d(-r A)/d log pi = -r A; dropped tokens give nothing
    torch.testing.assert_close(inputs[0].grad, torch.tensor([-1.0, 2.0, 0.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("kl_mask", "expected", "gradient"),
    [
        ("all", LN2 + math.log(0.1), [0.5, 0.5, 0.5]),
        ("masked", math.log(0.1), [0.0, 0.0, 0.5]),
        ("unmasked", LN2, [0.5, 0.5, 0.0]),
    ],
)
def test_token_ratio_kl_term(kl_mask, expected, gradient):
    inputs = _tensors([1.0, 2.0, 0.1], [0.0, 0.0, 0.0], [0, 0, 0])
    sums = token_ratio_loss(*inputs, limits=LIMITS, kl_tau=0.5, kl_mask=kl_mask)
    assert sums.loss.item() == pytest.approx(0.5 * expected)
    sums.loss.backward()
    torch.testing.assert_close(inputs[0].grad, torch.tensor(gradient, dtype=torch.float64))


def test_one_low_ratio_drops_its_whole_sequence():
    limits = RatioLimits(low=0.125, high=8.0, sequence_low=0.5)
    inputs = _tensors([1.0, 0.4, 1.0, 0.6], [1.0, 1.0, 1.0, 1.0], [0, 0, 1, 1])
    sums = token_ratio_loss(*inputs, limits=limits, kl_tau=0.0, kl_mask="all")
    assert sums.loss.item() == pytest.approx(-1.6)
    assert sums.masked_sequence.item() == 2


@pytest.mark.parametrize("length_norm", [False, True])
def test_sequence_ratio_by_hand(length_norm):
    # sequence 0: token ratios 2 and 2, so s = 2 ln 2 (or ln 2); sequence 1: ratio 1, advantage -3
    inputs = _tensors([2.0, 2.0, 1.0], [1.0, 1.0, -3.0], [0, 0, 1])
    sums = sequence_ratio_loss(*inputs, limits=LIMITS, kl_tau=0.0, kl_mask="all", length_norm=length_norm)
    ratio = 2.0 if length_norm else 4.0
    assert sums.loss.item() == pytest.approx(-(ratio + ratio) / 2 + 3.0)
    assert sums.mismatch_kl.item() == pytest.approx(2 * (2 - LN2 - 1))
    sums.loss.backward()
    expected = torch.tensor([-ratio / 2, -ratio / 2, 3.0], dtype=torch.float64)
    torch.testing.assert_close(inputs[0].grad, expected)


def test_sequence_ratio_limits_apply_to_the_sequence_ratio():
    # each token ratio 4 is fine, their product 16 is above 8
    inputs = _tensors([4.0, 4.0], [1.0, 1.0], [0, 0])
    sums = sequence_ratio_loss(*inputs, limits=LIMITS, kl_tau=0.0, kl_mask="all", length_norm=False)
    assert sums.loss.item() == 0.0
    assert sums.masked_high.item() == 2


def test_sequence_ratio_kl_term_is_per_sequence_mean():
    inputs = _tensors([2.0, 2.0, 1.0], [0.0, 0.0, 0.0], [0, 0, 1])
    sums = sequence_ratio_loss(*inputs, limits=LIMITS, kl_tau=0.1, kl_mask="all", length_norm=True)
    assert sums.loss.item() == pytest.approx(0.1 * LN2)


def test_an_infinite_ratio_gives_no_gradient():
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    sampler = torch.tensor([-1.0, -1000.0])
    sums = token_ratio_loss(
        logprobs,
        sampler,
        torch.ones(2),
        torch.zeros(2, dtype=torch.long),
        limits=LIMITS,
        kl_tau=0.0,
        kl_mask="all",
    )
    sums.loss.backward()
    assert sums.loss.item() == -1.0
    assert logprobs.grad.tolist() == [-1.0, 0.0]


def test_no_tokens():
    inputs = _tensors([], [], [])
    inputs = (*inputs[:3], torch.zeros(0, dtype=torch.long))
    for sums in (
        token_ratio_loss(*inputs, limits=LIMITS, kl_tau=0.1, kl_mask="all"),
        sequence_ratio_loss(*inputs, limits=LIMITS, kl_tau=0.1, kl_mask="all", length_norm=True),
    ):
        assert sums.loss.item() == 0.0
        sums.loss.backward()
