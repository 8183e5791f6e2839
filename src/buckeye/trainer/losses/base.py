"""What losses are functions of and what they return, with what all of them share: statistics, the reference
KL and the entropy bonus.

Notation: for a token t that the policy wrote, mu is the sampler's probability and pi the trainer's,
l_t = log pi_t - log mu_t, r_t = e^{l_t}, A_t the advantage; sg stops the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from buckeye.config.losses import BaseLossConfig, KlEstimator

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """What is known about the N trained tokens of a row, all [N]: `logprobs` and `entropies`, the trainer's
    and differentiable; `sampler_logprobs`; `reference_logprobs`, None without a reference model;
    `advantages`; `sequences` i64, the number of a token's sample within the row; `staleness` i64, how many
    versions behind the present weights those were that wrote the token."""

    logprobs: Tensor
    entropies: Tensor
    sampler_logprobs: Tensor
    reference_logprobs: Tensor | None
    advantages: Tensor
    sequences: Tensor
    staleness: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLosses:
    """What a loss says of each of N tokens.

    `policy` [N] is the policy-gradient term, which a correction may weigh down; `penalty` [N] is what stays
    as it is, None for nothing. `log_weights` [N] is the logarithm of the importance weight that a correction
    limits, None for l_t. `marks` are bool[N] by name: which tokens were masked or clipped, and why.
    """

    policy: Tensor
    penalty: Tensor | None = None
    log_weights: Tensor | None = None
    marks: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSums:
    """Sums over the tokens of a row. `loss` is differentiable and is to be divided by `divisor` of the whole
    batch (all rows, all ranks), so that a token weighs the same wherever it lands. `statistics` are
    detached scalars by the names of `statistic_names`."""

    loss: Tensor
    statistics: Mapping[str, Tensor]


def log_ratios(inputs: LossInputs) -> Tensor:
    """l_t [N] within +-20, so that its exponential is finite; the gradient is that of log pi everywhere."""
    bounded = (inputs.logprobs - inputs.sampler_logprobs).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return with_gradient_of(bounded, inputs.logprobs)


def with_gradient_of(values: Tensor, source: Tensor) -> Tensor:
    """`values`, with the gradient of `source`."""
    return values.detach() + (source - source.detach())


def sequence_sums(values: Tensor, sequences: Tensor) -> Tensor:
    """The sums of `values` [N] over each sequence, [number of sequences]."""
    count = int(sequences.max()) + 1 if len(sequences) else 0
    return values.new_zeros(count).index_add(0, sequences, values)


def sequence_lengths(inputs: LossInputs) -> Tensor:
    """How many trained tokens the sequence of each token has, [N]."""
    ones = torch.ones_like(inputs.logprobs, requires_grad=False)
    return sequence_sums(ones, inputs.sequences)[inputs.sequences]


def sequence_log_ratios(inputs: LossInputs, *, mean: bool) -> Tensor:
    """For each token, the sum of l over its sequence, or its mean; [N], detached."""
    total = sequence_sums(log_ratios(inputs).detach(), inputs.sequences)[inputs.sequences]
    return total / sequence_lengths(inputs) if mean else total


_COUNTS = ("trained_tokens", "tokens", "tokens_fresh")
_OF_AGE_0 = ("entropy", "mismatch_kl")
_FRESH = tuple(f"{name}_fresh" for name in _OF_AGE_0)
SUMS = (*_COUNTS, *_OF_AGE_0, *_FRESH, "ratio", "squared_ratio")
REFERENCE_SUMS = ("reference_kl",)


def with_advantage(inputs: LossInputs) -> Tensor:
    """Which tokens are of a sample with an advantage other than 0 anywhere, bool[N]."""
    found = (inputs.advantages != 0).to(inputs.logprobs.dtype)
    return sequence_sums(found, inputs.sequences)[inputs.sequences] > 0


@torch.no_grad()
def token_sums(inputs: LossInputs, marks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums under the names `SUMS`, `REFERENCE_SUMS` with a reference model, and those of `marks` (bool[N]).

    They are over the `tokens` of samples with an advantage; what ends in `_fresh`, over those of them that
    the present weights wrote. Only `trained_tokens` and `reference_kl` are over all that the loss is of.

    `mismatch_kl` is of r - l - 1 (the k3 estimate of KL(mu || pi), Schulman 2020, "Approximating KL
    divergence"), `reference_kl` of the same estimate of KL(pi || reference).
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
        sums["reference_kl"] = estimate_kl(inputs.logprobs, inputs.reference_logprobs, "k3").sum()
    return sums | {name: (mark & recorded).sum() for name, mark in marks.items()}


@torch.no_grad()
def ratio_range(inputs: LossInputs) -> tuple[float, float]:
    """The smallest and the largest ratio of the tokens of samples with an advantage; (inf, -inf) without."""
    ratios, recorded = log_ratios(inputs).exp(), with_advantage(inputs)
    if not len(ratios):
        return torch.inf, -torch.inf
    low = torch.where(recorded, ratios, torch.inf).min()
    high = torch.where(recorded, ratios, -torch.inf).max()
    return float(low), float(high)


def averages(sums: Mapping[str, float]) -> dict[str, float]:
    """From a batch's sums (all rows, all ranks) to its record: means per token, and

    effective_sample_size = (sum r)^2 / (n sum r^2), from 1/n to 1 (Kong 1992): which part of the n tokens
    would carry as much information if all had the same weight. Of what there are no tokens of, there is
    nothing to say.
    """
    rest = [name for name in sums if name not in (*_COUNTS, *_FRESH, *REFERENCE_SUMS)]
    means = {
        **_means(sums, rest, "tokens"),
        **_means(sums, _FRESH, "tokens_fresh"),
        **_means(sums, [name for name in REFERENCE_SUMS if name in sums], "trained_tokens"),
    }
    if "ratio" in means:
        ratio, squared_ratio = means.pop("ratio"), means.pop("squared_ratio")
        means |= {"ratio_mean": ratio, "effective_sample_size": ratio**2 / squared_ratio}
    return {**means, "trained_tokens": sums["trained_tokens"]}


def _sum(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, 0.0).sum()


def _means(sums: Mapping[str, float], names: Sequence[str], over: str) -> dict[str, float]:
    return {name: sums[name] / sums[over] for name in names} if sums[over] else {}


def estimate_kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """An estimate of KL(pi || reference) from each sampled token, [N] and differentiable.

    With d = log pi - log reference: k1 = d, k2 = d^2 / 2, k3 = e^{-d} - 1 + d (Schulman 2020, "Approximating
    KL divergence"). k1 and k3 have the right mean on policy; as a term of a loss, k2 has the right gradient
    there, k3 that of KL(reference || pi), and that of k1 is zero in the mean (Tang & Munos 2025, arXiv
    2506.09477). `k3_weighted` is k3 here: what it is weighted with is not about the divergence.
    """
    bounded = (logprobs - reference_logprobs).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    difference = with_gradient_of(bounded, logprobs)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


def with_kl_reward(inputs: LossInputs, config: BaseLossConfig) -> LossInputs:
    """With the estimator k1: the inputs with A_t - kl_coef sg[k1_t] for A_t: a reward of each token."""
    if not (config.kl_coef and config.kl_estimator == "k1"):
        return inputs
    kl = estimate_kl(inputs.logprobs, _reference(inputs), "k1").detach()
    return replace(inputs, advantages=inputs.advantages - config.kl_coef * kl)


def regularization(inputs: LossInputs, config: BaseLossConfig) -> Tensor | None:
    """kl_coef KL_t (all estimators but k1) - entropy_coef H_t, [N]; None if both are off.

    `k3_weighted` is r_t k3_t with the gradient of both factors: its mean over mu is that of k3 over pi; its
    value and gradient are those of KL(pi || reference), whoever sampled (DeepSeek-V3.2, arXiv 2512.02556).
    """
    terms = []
    if config.kl_coef and config.kl_estimator != "k1":
        kl = estimate_kl(inputs.logprobs, _reference(inputs), config.kl_estimator)
        if config.kl_estimator == "k3_weighted":
            kl = log_ratios(inputs).exp() * kl
        terms.append(config.kl_coef * kl)
    if config.entropy_coef:
        terms.append(-config.entropy_coef * inputs.entropies)
    return torch.stack(terms).sum(0) if terms else None


def _reference(inputs: LossInputs) -> Tensor:
    assert inputs.reference_logprobs is not None, "kl_coef needs a reference model"
    return inputs.reference_logprobs
