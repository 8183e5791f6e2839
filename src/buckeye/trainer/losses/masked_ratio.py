"""The default loss: an importance-weighted policy gradient without tokens of extreme ratios."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from buckeye.config.losses import KlMask
from buckeye.trainer.losses.base import (
    LossInputs,
    TokenLosses,
    log_ratios,
    sequence_log_ratios,
    with_gradient_of,
)

MARKS = ("masked_low", "masked_high", "masked_sequence")
_SEQUENCE_LIMIT = 10.0


def masked_ratio_loss(
    inputs: LossInputs,
    *,
    ratio_type: Literal["token", "sequence"] = "token",
    ratio_length_norm: bool = False,
    mask_ratio_low: float = 0.125,
    mask_ratio_high: float = 8.0,
    sequence_mask_ratio_low: float = 0.0,
    kl_tau: float = 0.0,
    kl_mask_type: KlMask = "all",
) -> TokenLosses:
    """-1{kept} rho_t A_t + kl_tau 1{in K} l_t.

    With `token`, rho_t = r_t. With `sequence`, all tokens of a sequence have one ratio, of s = sum_t l_t or,
    with `ratio_length_norm`, the mean (then it is GSPO's, Zheng et al. 2025, arXiv 2507.18071, eq. 7):
    rho_t = exp(min(log pi_t - sg[log pi_t] + sg[s], 10)).

    Kept are tokens with rho_t in [mask_ratio_low, mask_ratio_high] in a sequence without any ratio below
    `sequence_mask_ratio_low`. Nothing is clipped: a token left out gives no policy gradient. This was the
    default of launchers of late 2025, and is what IcePop does on both sides ("Every Step Evolves", arXiv
    2510.18855). K is every token (`all`), those left out (`masked`) or those kept (`unmasked`).

    The term in l_t is that launcher's, kept for its configurations. Its expectation under the sampler is
    -kl_tau KL(mu || pi): it does not hold the policy to the sampler, and is better left at 0.
    """
    difference = log_ratios(inputs)
    if ratio_type == "token":
        ratios = difference.exp()
    else:
        total = sequence_log_ratios(inputs, mean=ratio_length_norm)
        ratios = with_gradient_of(total, inputs.logprobs).clamp_max(_SEQUENCE_LIMIT).exp()
    marks = {
        "masked_low": ratios.detach() < mask_ratio_low,
        "masked_high": ratios.detach() > mask_ratio_high,
        "masked_sequence": _smallest_in_sequence(ratios.detach(), inputs.sequences) < sequence_mask_ratio_low,
    }
    kept = ~(marks["masked_low"] | marks["masked_high"] | marks["masked_sequence"])
    penalty = None
    if kl_tau:
        chosen = {"all": torch.ones_like(kept), "masked": ~kept, "unmasked": kept}[kl_mask_type]
        penalty = kl_tau * torch.where(chosen, difference, 0.0)
    policy = -torch.where(kept, ratios, 0.0) * inputs.advantages
    return TokenLosses(policy=policy, penalty=penalty, marks=marks)


def _smallest_in_sequence(ratios: Tensor, sequences: Tensor) -> Tensor:
    """For each token, the smallest ratio in its sequence."""
    count = int(sequences.max()) + 1 if len(sequences) else 0
    smallest = ratios.new_full((count,), torch.inf).scatter_reduce(0, sequences, ratios, "amin")
    return smallest[sequences]
