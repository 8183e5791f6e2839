"""Inputs and outputs of losses.

Notation: for a token t that the policy wrote, mu is the sampler's probability and pi the trainer's, l_t = log
pi_t - log mu_t, r_t = e^{l_t}, A_t is the advantage, and sg stops the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """Inputs for the N trained tokens of a row, all [N].

    `logprobs` and `entropies` are the trainer's and differentiable. `reference_logprobs` may be None (without
    a reference model). `sequences` i64 is the index of a token's sample within the row. `staleness` i64 is
    the number of versions between the weights that sampled the token and the current ones.
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
    logarithm of the importance weight that a correction limits; None means l_t. `masks` are bool[N] by name:
    the tokens that were masked or clipped, per reason.
    """

    policy: Tensor
    log_weights: Tensor | None = None
    masks: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSums:
    """Sums over the tokens of a row.

    `loss` is differentiable. The caller divides the loss by `divisor` of the whole batch (all rows, all
    ranks), so that a token has equal weight in every row. `statistics` are detached scalars, named by
    `statistic_names`.
    """

    loss: Tensor
    statistics: Mapping[str, Tensor]


def log_ratios(inputs: LossInputs) -> Tensor:
    """Return l_t [N], clamped to +-20 so that its exponential is finite.

    The gradient is that of log pi everywhere.
    """
    bounded = (inputs.logprobs - inputs.sampler_logprobs).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return with_gradient_of(bounded, inputs.logprobs)


def with_gradient_of(values: Tensor, source: Tensor) -> Tensor:
    """Return `values` with the gradient of `source`."""
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
    """Return for each token the mean of l over its sequence, [N], detached."""
    total = sequence_sums(log_ratios(inputs).detach(), inputs.sequences)[inputs.sequences]
    return total / sequence_lengths(inputs)
