"""Inputs and outputs of losses.

In formulas, pi_t is the probability of token t under the trained policy, and mu_t its probability under the
policy that sampled it. l_t = log pi_t - log mu_t, r_t = e^{l_t}, A_t is the advantage, and sg stops the
gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """Inputs of a loss for the N trained tokens of a row. All tensors are [N].

    The trainer computed `logprobs` and `entropies`, which are differentiable. `reference_logprobs` is None
    without a reference model. `sequences` i64 is the index of the token's sample in the row. `staleness` i64
    is the current version of the weights minus the version that sampled the token. After an update of the
    step, it is one more, so that no token is on-policy.
    """

    logprobs: Tensor
    entropies: Tensor
    sampler_logprobs: Tensor
    reference_logprobs: Tensor | None
    advantages: Tensor
    sequences: Tensor
    staleness: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLosses:
    """Loss terms of N tokens.

    `policy` [N] is the policy-gradient term, which a correction may reduce. `log_weights` [N] is the
    logarithm of the importance weight that a correction limits; None means l_t. `masks` has a tensor
    bool[N] for each reason why tokens are masked or clipped.
    """

    policy: Tensor
    log_weights: Tensor | None = None
    masks: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSums:
    """Sums over the tokens of a row.

    `loss` is differentiable. The caller divides it by `divisor`, a count over all rows and ranks of the
    batch, so that a token has equal weight in every row. `statistics` are scalars without gradient, with the
    names of `statistic_names`.
    """

    loss: Tensor
    statistics: Mapping[str, Tensor]


def log_ratios(inputs: LossInputs) -> Tensor:
    """Return l_t [N], clamped to [-20, 20], so that its exponential is finite.

    Clamped values also have the gradient of log pi_t.
    """
    bounded = (inputs.logprobs - inputs.sampler_logprobs).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return with_gradient_of(bounded, inputs.logprobs)


def with_gradient_of(values: Tensor, source: Tensor) -> Tensor:
    """Return a tensor that has the values of `values`, and the gradient of `source`."""
    return values.detach() + (source - source.detach())


def sequence_sums(values: Tensor, sequences: Tensor) -> Tensor:
    """Return the sum of `values` [N] over each sequence, [number of sequences]."""
    count = int(sequences.max()) + 1 if len(sequences) else 0
    return values.new_zeros(count).index_add(0, sequences, values)


def sequence_lengths(inputs: LossInputs) -> Tensor:
    """Return the number of trained tokens in each token's sequence, [N]."""
    ones = torch.ones_like(inputs.logprobs, requires_grad=False)
    return sequence_sums(ones, inputs.sequences)[inputs.sequences]


def sequence_log_ratios(inputs: LossInputs) -> Tensor:
    """Return for each token the mean of l_t over its sequence, [N], without gradient."""
    total = sequence_sums(log_ratios(inputs).detach(), inputs.sequences)[inputs.sequences]
    return total / sequence_lengths(inputs)
