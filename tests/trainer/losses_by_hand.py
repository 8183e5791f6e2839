"""Helpers of the loss tests: inputs from ratios, and sums and gradients of a configured loss."""

from collections.abc import Sequence

import torch
from pydantic import TypeAdapter
from torch import Tensor

from buckeye.config.losses import LossConfig
from buckeye.trainer.losses.base import LossInputs, LossSums
from buckeye.trainer.losses.policy_gradient import total_loss

_CONFIG: TypeAdapter[LossConfig] = TypeAdapter(LossConfig)
SAMPLER_LOGPROB = -1.0


def config_of(kind: str, **settings) -> LossConfig:
    return _CONFIG.validate_python({"type": kind, **settings})


def inputs_of(
    ratios: Sequence[float],
    advantages: Sequence[float],
    sequences: Sequence[int] | None = None,
    *,
    staleness: Sequence[int] | None = None,
    reference: Sequence[float] | None = None,
    sampler: Sequence[float] | None = None,
) -> LossInputs:
    """Return tokens with these ratios of trainer to sampler probability.

    The sampler's log-probs are -1 by default. `reference` holds log-probs.
    """
    count = len(ratios)
    mu = _floats([SAMPLER_LOGPROB] * count if sampler is None else sampler)
    return LossInputs(
        logprobs=(mu + _floats(ratios).log()).requires_grad_(),
        entropies=_floats([0.5] * count).requires_grad_(),
        sampler_logprobs=mu,
        reference_logprobs=None if reference is None else _floats(reference),
        advantages=_floats(advantages),
        sequences=torch.tensor([0] * count if sequences is None else sequences, dtype=torch.long),
        staleness=torch.tensor([1] * count if staleness is None else staleness, dtype=torch.long),
    )


def loss_and_gradient(inputs: LossInputs, kind: str, **settings) -> tuple[float, list[float]]:
    sums = sums_of(inputs, kind, **settings)
    sums.loss.backward()
    return sums.loss.item(), inputs.logprobs.grad.tolist()


def sums_of(inputs: LossInputs, kind: str, **settings) -> LossSums:
    return total_loss(inputs, config_of(kind, **settings))


def counts(sums: LossSums, *names: str) -> list[float]:
    return [float(sums.statistics[name]) for name in names]


def _floats(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
