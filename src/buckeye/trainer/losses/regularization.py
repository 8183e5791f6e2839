"""Terms that any loss may have: the divergence from a reference model, and the entropy."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from buckeye.config.losses import BaseLossConfig, KlEstimator
from buckeye.trainer.losses.base import LOG_RATIO_LIMIT, LossInputs, log_ratios, with_gradient_of


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
