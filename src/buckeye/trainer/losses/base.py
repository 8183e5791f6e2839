"""What losses are functions of and what they return.

Notation: for a token t that the policy wrote, mu is the sampler's probability and pi the trainer's,
l_t = log pi_t - log mu_t, r_t = e^{l_t}, A_t the advantage; sg stops the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
