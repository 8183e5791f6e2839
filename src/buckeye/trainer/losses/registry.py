"""From the settings of a loss to its value, and what is recorded of its tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from buckeye.config.losses import (
    CustomLossConfig,
    DPPOLossConfig,
    LossConfig,
    MaskedRatioLossConfig,
    Normalization,
    NormalizedLossConfig,
)
from buckeye.trainer.losses import policy_gradient
from buckeye.trainer.losses.base import (
    LossInputs,
    LossSums,
    TokenLosses,
    log_ratios,
    sequence_lengths,
    sequence_sums,
)
from buckeye.trainer.losses.policy_gradient import custom_loss, load_custom_loss
from buckeye.trainer.losses.regularization import estimate_kl, regularization, with_kl_reward


@dataclass(frozen=True, slots=True)
class LossType:
    """A loss: its keyword arguments are the settings of the same names. `marks` are those it returns."""

    function: Callable[..., TokenLosses]
    marks: tuple[str, ...]


LOSS_TYPES: Mapping[str, LossType] = {
    "masked_ratio": LossType(policy_gradient.masked_ratio_loss, policy_gradient.MASKED_RATIO_MASKS),
    "ppo": LossType(policy_gradient.ppo_loss, policy_gradient.PPO_CLIP_MASKS),
    "dr_grpo": LossType(policy_gradient.ppo_loss, policy_gradient.PPO_CLIP_MASKS),
    "gspo": LossType(policy_gradient.gspo_loss, policy_gradient.CLIP_MASKS),
    "decoupled_ppo": LossType(policy_gradient.decoupled_ppo_loss, policy_gradient.CLIP_MASKS),
    "cispo": LossType(policy_gradient.cispo_loss, policy_gradient.CISPO_CLIP_MASKS),
    "dppo": LossType(policy_gradient.dppo_loss, policy_gradient.DPPO_CLIP_MASKS),
    "reinforce": LossType(policy_gradient.reinforce_loss, ()),
}
"""All types but `custom` and the recipes."""

RECIPES: Mapping[str, str] = {
    "grpo": "ppo",
    "dapo": "ppo",
    "rloo": "reinforce",
    "tis": "cispo",
    "icepop": "masked_ratio",
    "areal": "decoupled_ppo",
}
"""Of which type the loss of a paper is, with other defaults."""


def _loss_type(config: LossConfig) -> LossType:
    return LOSS_TYPES[RECIPES.get(config.type, config.type)]


def check_loss(config: LossConfig) -> None:
    """Raise `UsageError` if the loss cannot be computed, before anything is loaded."""
    if isinstance(config, CustomLossConfig):
        load_custom_loss(config)


def total_loss(inputs: LossInputs, config: LossConfig) -> LossSums:
    """The loss of a row with correction, reference KL, entropy bonus and weights of its normalization."""
    rewarded = with_kl_reward(inputs, config)
    losses = _token_losses(rewarded, config)
    terms, marks = losses.policy, dict(losses.marks)
    if isinstance(config, NormalizedLossConfig) and config.correction is not None:
        log_weights = losses.log_weights if losses.log_weights is not None else log_ratios(inputs)
        factors, corrected = policy_gradient.correction_factors(
            log_weights, inputs.sequences, config.correction
        )
        terms, marks = terms * factors, {**marks, **corrected}
    for addition in (losses.penalty, regularization(inputs, config)):
        if addition is not None:
            terms = terms + addition
    if normalization_of(config) == "sequence":
        terms = terms / sequence_lengths(inputs)
    return LossSums(loss=terms.sum(), statistics=token_sums(inputs, marks))


def statistic_names(config: LossConfig) -> tuple[str, ...]:
    """The keys of `LossSums.statistics`."""
    marks = () if isinstance(config, CustomLossConfig) else _loss_type(config).marks
    corrected = isinstance(config, NormalizedLossConfig) and config.correction is not None
    return (
        *SUMS,
        *(REFERENCE_SUMS if config.kl_coef else ()),
        *marks,
        *(policy_gradient.CORRECTION_MASKS if corrected else ()),
    )


def normalization_of(config: LossConfig) -> Normalization:
    """How the batch is averaged; the default loss follows its kind of ratio."""
    return config.ratio_type if isinstance(config, MaskedRatioLossConfig) else config.normalization


def divisor(trained: Sequence[int], config: LossConfig, *, seq_len: int) -> float:
    """What the batch's sum is divided by, from the numbers of trained tokens of all its sequences: the
    tokens, the sequences, or the sequences times a constant length (Dr. GRPO, Liu et al. 2025, arXiv
    2503.20783, section 3.2)."""
    tokens, sequences = sum(trained), sum(map(bool, trained))
    kind = normalization_of(config)
    if kind == "token":
        return float(max(1, tokens))
    if kind == "sequence":
        return float(max(1, sequences))
    assert isinstance(config, NormalizedLossConfig)
    return float(max(1, sequences) * (config.normalization_length or seq_len))


def needs_every_sample(config: LossConfig) -> bool:
    """Whether samples without advantage move the weights too."""
    penalized = isinstance(config, MaskedRatioLossConfig | DPPOLossConfig) and config.kl_tau
    return bool(penalized or config.kl_coef or config.entropy_coef or isinstance(config, CustomLossConfig))


def _token_losses(inputs: LossInputs, config: LossConfig) -> TokenLosses:
    if isinstance(config, CustomLossConfig):
        return custom_loss(inputs, config)
    function = _loss_type(config).function
    settings = [name for name in inspect.signature(function).parameters if name != "inputs"]
    return function(inputs, **{name: getattr(config, name) for name in settings})


# What is recorded of the tokens of a loss.

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
