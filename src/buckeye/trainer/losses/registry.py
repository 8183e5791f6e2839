"""From the settings of a loss to its value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
    REFERENCE_SUMS,
    SUMS,
    LossInputs,
    LossSums,
    TokenLosses,
    log_ratios,
    regularization,
    sequence_lengths,
    token_sums,
    with_kl_reward,
)
from buckeye.trainer.losses.policy_gradient import custom_loss, load_custom_loss


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
