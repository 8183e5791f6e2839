"""Policy-gradient losses: pure functions of log-probabilities, one per formula.

Notation: for a token t that the policy wrote, mu is the sampler's probability and pi the trainer's,
l_t = log pi_t - log mu_t, A_t the advantage. All functions take flat tensors of the N trained tokens and the
index of the sequence each belongs to, and return *sums*; the caller divides by the count over the whole batch
(all bins, all ranks), so that a token weighs the same wherever it lands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KlMask = Literal["masked", "unmasked", "all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioLimits:
    """Which tokens are left out of the policy gradient: those with a ratio below `low` or above `high`, and
    all tokens of a sequence whose smallest ratio is below `sequence_low`. Nothing is clipped: a token left
    out gives no gradient."""

    low: float
    high: float
    sequence_low: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSums:
    """`loss`: differentiable, to be divided by the batch's number of tokens (`token_ratio_loss`) or sequences
    (`sequence_ratio_loss`). The rest are detached sums over the tokens: `mismatch_kl` of r - l - 1 with the
    token's own ratio r = e^l (the k3 estimate of KL(mu || pi), Schulman 2020, "Approximating KL divergence"),
    and how many tokens were left out as too low, too high, or with their sequence."""

    loss: Tensor
    mismatch_kl: Tensor
    masked_low: Tensor
    masked_high: Tensor
    masked_sequence: Tensor


def token_ratio_loss(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    limits: RatioLimits,
    kl_tau: float,
    kl_mask: KlMask,
) -> LossSums:
    """sum_t [ -1{kept} r_t A_t + kl_tau 1{in K} l_t ] with r_t = e^{l_t}; divide by the number of tokens.

    The default of the launchers of late 2025: an importance-weighted policy gradient in which tokens with an
    extreme ratio are dropped on both sides (cf. IcePop in "Every Step Evolves", arXiv 2510.18855).
    K is every token (`all`), the dropped (`masked`) or the kept ones (`unmasked`).
    """
    difference = logprobs - sampler_logprobs
    kept, dropped = _keep(difference.detach().exp(), sequences, limits)
    # a dropped token's ratio may be infinite: it must not even be multiplied by a gradient of zero
    policy = -(difference[kept].exp() * advantages[kept]).sum()
    loss = policy + kl_tau * difference[_kl_tokens(kept, kl_mask)].sum()
    return LossSums(loss=loss, mismatch_kl=_mismatch_kl(difference), **dropped)


def sequence_ratio_loss(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    limits: RatioLimits,
    kl_tau: float,
    kl_mask: KlMask,
    length_norm: bool,
) -> LossSums:
    """The same with one ratio per sequence, and every sequence weighted equally; divide by their number.

    s = sum_t l_t, divided by the sequence's length with `length_norm` (then it is GSPO's ratio, Zheng et al.
    2025, arXiv 2507.18071); r_t = exp(min(log pi_t - sg[log pi_t] + sg[s], 10)); each sequence's sum is
    divided by its number of trained tokens.
    """
    difference = logprobs - sampler_logprobs
    lengths = _per_sequence(torch.ones_like(difference), sequences)
    total = _per_sequence(difference.detach(), sequences)
    total = total / lengths if length_norm else total
    ratios = (logprobs - logprobs.detach() + total[sequences]).clamp_max(10.0).exp()
    kept, dropped = _keep(ratios, sequences, limits)
    weight = 1.0 / lengths[sequences]
    kl = _kl_tokens(kept, kl_mask)
    loss = -(ratios * advantages * weight)[kept].sum() + kl_tau * (difference * weight)[kl].sum()
    return LossSums(loss=loss, mismatch_kl=_mismatch_kl(difference), **dropped)


def _keep(ratios: Tensor, sequences: Tensor, limits: RatioLimits) -> tuple[Tensor, dict[str, Tensor]]:
    ratios = ratios.detach()
    low, high = ratios < limits.low, ratios > limits.high
    smallest = ratios.new_full((int(sequences.max()) + 1 if len(sequences) else 0,), torch.inf)
    smallest = smallest.scatter_reduce(0, sequences, ratios, "amin")
    in_sequence = (smallest < limits.sequence_low)[sequences]
    counts = {
        "masked_low": low.sum(),
        "masked_high": high.sum(),
        "masked_sequence": in_sequence.sum(),
    }
    return ~(low | high | in_sequence), counts


def _kl_tokens(kept: Tensor, kl_mask: KlMask) -> Tensor:
    return {"all": torch.ones_like(kept), "masked": ~kept, "unmasked": kept}[kl_mask]


def _mismatch_kl(difference: Tensor) -> Tensor:
    difference = difference.detach()
    return (difference.exp() - difference - 1).sum()


def _per_sequence(values: Tensor, sequences: Tensor) -> Tensor:
    count = int(sequences.max()) + 1 if len(sequences) else 0
    return values.new_zeros(count).index_add(0, sequences, values)
