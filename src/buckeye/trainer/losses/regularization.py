"""Optional terms of every loss: divergence from a reference model, and entropy."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from buckeye.config.losses import BaseLossConfig, KlEstimator
from buckeye.trainer.losses.base import LOG_RATIO_LIMIT, LossInputs, log_ratios, with_gradient_of


def estimate_kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Return an estimate of KL(pi || reference) from each sampled token, [N] and differentiable.

    With d = log pi - log reference: k1 = d, k2 = d^2 / 2, k3 = e^{-d} - 1 + d (Schulman 2020, "Approximating
    KL divergence"). k1 and k3 have the right mean on policy. As on-policy loss terms, k2 has the right
    gradient, k3 has the gradient of KL(reference || pi), and the gradient of k1 has mean zero (Tang & Munos
    2025, arXiv 2506.09477). For `k3_weighted` this returns k3; `regularization` applies the weight.
    """
    bounded = (logprobs - reference_logprobs).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    difference = with_gradient_of(bounded, logprobs)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


def with_kl_reward(inputs: LossInputs, config: BaseLossConfig) -> LossInputs:
    """Return the inputs with A_t - kl_coef sg[k1_t] as advantages, if the estimator is k1.

    So k1 acts as a reward of each token. Other estimators leave the advantages unchanged.
    """
    if not (config.kl_coef and config.kl_estimator == "k1"):
        return inputs
    kl = estimate_kl(inputs.logprobs, _reference(inputs), "k1").detach()
    return replace(inputs, advantages=inputs.advantages - config.kl_coef * kl)


def regularization(inputs: LossInputs, config: BaseLossConfig) -> Tensor | None:
    """Return kl_coef KL_t (all estimators but k1) - entropy_coef H_t, [N]; None if both are off.

    `k3_weighted` is r_t k3_t with the gradient of both factors. For any sampler mu, its mean and mean
    gradient are those of KL(pi || reference) (DeepSeek-V3.2, arXiv 2512.02556).
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
