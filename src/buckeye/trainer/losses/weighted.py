"""Losses that weigh the policy gradient of a token, or leave it out."""

from __future__ import annotations

import torch

from buckeye.trainer.losses.base import LossInputs, TokenLosses, log_ratios

CISPO_MARKS = ("clipped_low", "clipped_high")
DPPO_MARKS = ("masked_low", "masked_high")


def cispo_loss(inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 4.0) -> TokenLosses:
    """-sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t log pi_t.

    MiniMax-M1, arXiv 2506.13585, eq. 4 and 5: the weight is clipped, and every token keeps its gradient. As
    there, nothing is clipped below by default; the default bound above is 5.
    """
    ratios = log_ratios(inputs).detach().exp()
    low, high = 1.0 - clip_low, 1.0 + clip_high
    weights = ratios.clamp(low, high)
    return TokenLosses(
        policy=-weights * inputs.advantages * inputs.logprobs,
        marks={"clipped_low": ratios < low, "clipped_high": ratios > high},
    )


def reinforce_loss(inputs: LossInputs) -> TokenLosses:
    """-A_t log pi_t (Williams 1992, REINFORCE), as if the present policy had sampled every token."""
    return TokenLosses(policy=-inputs.advantages * inputs.logprobs)


def dppo_loss(
    inputs: LossInputs, *, mask_low: float = 0.2, mask_high: float = 0.2, kl_tau: float = 1e-3
) -> TokenLosses:
    """-1{kept} r_t A_t + kl_tau l_t^2. Left out are tokens with A_t > 0 and pi_t - mu_t > mask_high, and
    those with A_t <= 0 and pi_t - mu_t < -mask_low.

    |pi_t - mu_t| is the total variation between the two policies if all other tokens are one: the binary
    variant of divergence PPO (Qi et al. 2026, arXiv 2602.04879). The squared log-ratio, on all tokens, is the
    regularizer of Kimi k1.5 (arXiv 2501.12599, section 2.3.2).
    """
    difference, advantages = log_ratios(inputs), inputs.advantages
    moved = inputs.logprobs.detach().exp() - inputs.sampler_logprobs.exp()
    marks = {
        "masked_low": (advantages <= 0) & (moved < -mask_low),
        "masked_high": (advantages > 0) & (moved > mask_high),
    }
    kept = ~(marks["masked_low"] | marks["masked_high"])
    return TokenLosses(
        policy=-torch.where(kept, difference.exp(), 0.0) * advantages,
        penalty=kl_tau * difference.square() if kl_tau else None,
        marks=marks,
    )
