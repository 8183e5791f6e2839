"""Optional terms of a loss: KL divergence from a reference model, and an entropy bonus."""

from __future__ import annotations

import torch
from torch import Tensor

from buckeye.config.losses import BaseLossConfig
from buckeye.trainer.losses.base import LOG_RATIO_LIMIT, LossInputs, log_ratios, with_gradient_of


def estimate_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return the k3 estimate of KL(pi || reference) from each sampled token, [N] and differentiable.

    k3 = e^{-d} - 1 + d, with d = log pi - log reference (Schulman 2020, "Approximating KL divergence"). For
    tokens that pi sampled, the mean of k3 is KL(pi || reference). But as a term of the loss, k3 has the
    gradient of KL(reference || pi) (Tang & Munos 2025, arXiv 2506.09477).
    """
    bounded = (logprobs - reference_logprobs).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    difference = with_gradient_of(bounded, logprobs)
    return torch.expm1(-difference) + difference


def regularization(inputs: LossInputs, config: BaseLossConfig) -> Tensor | None:
    """Return kl_coef * KL_t - entropy_coef * H_t, [N], or None if both coefficients are 0.

    The estimator `k3_weighted` is r_t * k3_t, with the gradient of both factors. For tokens of any sampler
    mu, its mean and mean gradient are those of KL(pi || reference) (DeepSeek-V3.2, arXiv 2512.02556).
    """
    terms = []
    if config.kl_coef:
        assert inputs.reference_logprobs is not None, "kl_coef needs a reference model"
        kl = estimate_kl(inputs.logprobs, inputs.reference_logprobs)
        if config.kl_estimator == "k3_weighted":
            kl = log_ratios(inputs).exp() * kl
        terms.append(config.kl_coef * kl)
    if config.entropy_coef:
        terms.append(-config.entropy_coef * inputs.entropies)
    return torch.stack(terms).sum(0) if terms else None
