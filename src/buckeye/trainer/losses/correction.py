"""Limits on importance weights, shared by all losses.

A weight w above or outside the limits means that a token, or a sequence, is unlikely to have come from the
policy that is trained: the sampler computes differently, or its weights were old. The term of the token is
multiplied by a constant:

    truncate    min(1, high / w)            the weight counts as `high` at most
    mask        1{low <= w <= high}         outside, there is no gradient

with the weight of the token, or at `sequence` level the product of its sequence's, or at `geometric` level
their geometric mean. Truncation of token weights is the usual truncated importance sampling; masking them on
both sides is IcePop (arXiv 2510.18855); masking sequences is masked importance sampling.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from buckeye.config.losses import CorrectionConfig, Level, MaskCorrectionConfig
from buckeye.trainer.losses.base import sequence_sums

MARKS = ("corrected_low", "corrected_high")


def correction_factors(
    log_weights: Tensor, sequences: Tensor, config: CorrectionConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """What to multiply the term of each token with, [N] and detached, and which tokens are below or above the
    limits. `log_weights` [N] are the logarithms of the tokens' weights."""
    levelled = _at_level(log_weights.detach(), sequences, config.level)
    above = levelled > math.log(config.high)
    if isinstance(config, MaskCorrectionConfig):
        below = levelled < (math.log(config.low) if config.low else -math.inf)
        factors = (~(below | above)).to(levelled.dtype)
    else:
        below = torch.zeros_like(above)
        factors = (math.log(config.high) - levelled).clamp_max(0.0).exp()
    return factors, {"corrected_low": below, "corrected_high": above}


def _at_level(log_weights: Tensor, sequences: Tensor, level: Level) -> Tensor:
    if level == "token":
        return log_weights
    totals = sequence_sums(log_weights, sequences)
    if level == "geometric":
        totals = totals / sequence_sums(torch.ones_like(log_weights), sequences)
    return totals[sequences]
