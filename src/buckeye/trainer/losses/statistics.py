"""What is recorded of the trained tokens at every step, whatever the loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from buckeye.trainer.losses.base import LossInputs, log_ratios
from buckeye.trainer.losses.regularization import estimate_kl

SUMS = ("trained_tokens", "entropy", "mismatch_kl", "ratio", "squared_ratio")
REFERENCE_SUMS = ("reference_kl",)


@torch.no_grad()
def token_sums(inputs: LossInputs) -> dict[str, Tensor]:
    """Sums over the tokens under the names `SUMS`, and `REFERENCE_SUMS` with a reference model.

    `mismatch_kl` is of r - l - 1 (the k3 estimate of KL(mu || pi), Schulman 2020, "Approximating KL
    divergence"), `reference_kl` of the same estimate of KL(pi || reference).
    """
    difference = inputs.logprobs - inputs.sampler_logprobs
    ratios = log_ratios(inputs).exp()
    sums = {
        "trained_tokens": torch.ones_like(ratios).sum(),
        "entropy": inputs.entropies.sum(),
        "mismatch_kl": (difference.exp() - difference - 1).sum(),
        "ratio": ratios.sum(),
        "squared_ratio": ratios.square().sum(),
    }
    if inputs.reference_logprobs is not None:
        sums["reference_kl"] = estimate_kl(inputs.logprobs, inputs.reference_logprobs, "k3").sum()
    return sums


@torch.no_grad()
def ratio_range(inputs: LossInputs) -> tuple[float, float]:
    """The smallest and the largest ratio; (inf, -inf) without tokens."""
    ratios = log_ratios(inputs).exp()
    if not len(ratios):
        return torch.inf, -torch.inf
    low, high = torch.aminmax(ratios)
    return float(low), float(high)


def averages(sums: Mapping[str, float]) -> dict[str, float]:
    """From a batch's sums (all rows, all ranks) to its record: means per trained token, and

    effective_sample_size = (sum r)^2 / (n sum r^2), from 1/n to 1 (Kong 1992): which part of the n tokens
    would carry as much information if all had the same weight. Without tokens there is nothing to say.
    """
    tokens = sums["trained_tokens"]
    if not tokens:
        return {"trained_tokens": 0.0}
    means = {name: value / tokens for name, value in sums.items()}
    return {
        **{name: means[name] for name in means if name not in ("trained_tokens", "ratio", "squared_ratio")},
        "ratio_mean": means["ratio"],
        "effective_sample_size": means["ratio"] ** 2 / means["squared_ratio"],
        "trained_tokens": tokens,
    }
