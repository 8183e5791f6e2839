"""Statistics of the tokens of a loss, which become metrics of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from buckeye.trainer.losses.base import LossInputs, log_ratios, sequence_sums
from buckeye.trainer.losses.regularization import estimate_kl

_COUNTS = ("trained_tokens", "tokens", "tokens_fresh")
_WITH_FRESH = ("entropy", "mismatch_kl")
_FRESH = tuple(f"{name}_fresh" for name in _WITH_FRESH)
SUMS = (*_COUNTS, *_WITH_FRESH, *_FRESH, "ratio", "squared_ratio")
REFERENCE_SUMS = ("reference_kl",)


def with_advantage(inputs: LossInputs) -> Tensor:
    """Return a mask bool[N] of all tokens of samples in which a token has a non-zero advantage."""
    nonzero = (inputs.advantages != 0).to(inputs.logprobs.dtype)
    return sequence_sums(nonzero, inputs.sequences)[inputs.sequences] > 0


@torch.no_grad()
def token_sums(inputs: LossInputs, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return sums over tokens by name.

    The names are those of `SUMS`, of `REFERENCE_SUMS` with a reference model, and of `masks` (bool[N]).

    A sum includes only tokens of samples with an advantage. A sum with a name that ends in `_fresh` includes
    only those tokens that the current weights sampled. `trained_tokens` and `reference_kl` include all
    tokens.

    `mismatch_kl` sums r - l - 1 (the k3 estimate of KL(mu || pi), Schulman 2020, "Approximating KL
    divergence"). `reference_kl` sums the k3 estimate of KL(pi || reference).
    """
    difference = inputs.logprobs - inputs.sampler_logprobs
    ratios = log_ratios(inputs).exp()
    recorded = with_advantage(inputs)
    fresh = recorded & (inputs.staleness <= 0)
    mismatch = difference.exp() - difference - 1
    sums = {
        "trained_tokens": torch.ones_like(recorded).sum(),
        "tokens": recorded.sum(),
        "tokens_fresh": fresh.sum(),
        "entropy": _sum(inputs.entropies, recorded),
        "mismatch_kl": _sum(mismatch, recorded),
        "entropy_fresh": _sum(inputs.entropies, fresh),
        "mismatch_kl_fresh": _sum(mismatch, fresh),
        "ratio": _sum(ratios, recorded),
        "squared_ratio": _sum(ratios.square(), recorded),
    }
    if inputs.reference_logprobs is not None:
        sums["reference_kl"] = estimate_kl(inputs.logprobs, inputs.reference_logprobs).sum()
    return sums | {name: (mask & recorded).sum() for name, mask in masks.items()}


def averages(sums: Mapping[str, float]) -> dict[str, float]:
    """Convert the sums over all rows and ranks of a batch to means per token.

    effective_sample_size = (sum r)^2 / (n sum r^2) is between 1/n and 1 (Kong 1992). n tokens with weights r
    have as much information as this share of n tokens with equal weights. A mean over no tokens is omitted.
    """
    per_token = [name for name in sums if name not in (*_COUNTS, *_FRESH, *REFERENCE_SUMS)]
    means = {
        **_means(sums, per_token, "tokens"),
        **_means(sums, _FRESH, "tokens_fresh"),
        **_means(sums, [name for name in REFERENCE_SUMS if name in sums], "trained_tokens"),
    }
    if "ratio" in means:
        ratio, squared_ratio = means.pop("ratio"), means.pop("squared_ratio")
        means |= {"ratio_mean": ratio, "effective_sample_size": ratio**2 / squared_ratio}
    return {**means, "trained_tokens": sums["trained_tokens"]}


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum()


def _means(sums: Mapping[str, float], names: Sequence[str], count: str) -> dict[str, float]:
    return {name: sums[name] / sums[count] for name in names} if sums[count] else {}
