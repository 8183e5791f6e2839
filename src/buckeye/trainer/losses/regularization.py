"""Terms that any loss may have: the divergence from a reference model, and the entropy."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from buckeye.config.losses import BaseLossConfig, KlEstimator
from buckeye.trainer.losses.base import LOG_RATIO_LIMIT, LossInputs, with_gradient_of


def estimate_kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """An estimate of KL(pi || reference) from each sampled token, [N] and differentiable.

    With d = log pi - log reference: k1 = d, k2 = d^2 / 2, k3 = e^{-d} - 1 + d (Schulman 2020, "Approximating
    KL divergence"). k1 and k3 have the right mean; as a term of a loss, k2 has the right gradient on policy,
    and that of k1 is zero in the mean (Tang & Munos 2025, arXiv 2506.09477).
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
    """kl_coef KL_t (k2 and k3 only) - entropy_coef H_t, [N]; None if both are off."""
    terms = []
    if config.kl_coef and config.kl_estimator != "k1":
        terms.append(config.kl_coef * estimate_kl(inputs.logprobs, _reference(inputs), config.kl_estimator))
    if config.entropy_coef:
        terms.append(-config.entropy_coef * inputs.entropies)
    return torch.stack(terms).sum(0) if terms else None


def _reference(inputs: LossInputs) -> Tensor:
    assert inputs.reference_logprobs is not None, "kl_coef needs a reference model"
    return inputs.reference_logprobs
