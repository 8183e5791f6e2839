"""Settings of the policy-gradient losses. docs/reference/losses.md has the formulas."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, Tag

from buckeye.config.shared import BaseConfig, Conflicts, ModelName, UserFunctionConfig, conflict, variant

Level = Literal["token", "sequence", "geometric"]
Normalization = Literal["token", "sequence", "constant"]
KlEstimator = Literal["k3", "k3_weighted"]
ClipFraction = Annotated[float, Field(ge=0, le=1)]


class TruncateCorrectionConfig(BaseConfig):
    """Correction that reduces importance weights above `high` to `high` (truncated importance sampling)."""

    type: Literal["truncate"] = "truncate"
    """Correction of importance weights."""
    level: Level = "token"
    """Weight to limit. token: the weight of each token. sequence: the product over the sequence. geometric:
    the geometric mean over the sequence."""
    high: PositiveFloat = 5.0
    """Maximum weight."""


class MaskCorrectionConfig(BaseConfig):
    """Correction that removes the policy gradient of tokens with an importance weight outside [low, high]."""

    type: Literal["mask"] = "mask"
    """Correction of importance weights."""
    level: Level = "token"
    """Weight to limit. token: the weight of each token. sequence: the product over the sequence. geometric:
    the geometric mean over the sequence."""
    low: NonNegativeFloat = 0.5
    """Minimum weight that is kept."""
    high: PositiveFloat = 5.0
    """Maximum weight that is kept."""

    def conflicts(self) -> Conflicts:
        if self.low >= self.high:
            yield conflict(
                f"`low` = {self.low:g} is not below `high` = {self.high:g}, so no token has a gradient",
                hint="lower `low`, or raise `high`",
            )


CorrectionConfig = Annotated[
    Annotated[TruncateCorrectionConfig, Tag("truncate")] | Annotated[MaskCorrectionConfig, Tag("mask")],
    variant("truncate"),
]


class BaseLossConfig(BaseConfig):
    """Settings of every loss."""

    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the reference model. 0: no reference model."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of KL(policy || reference). k3: correct value only on policy, and the gradient of
    KL(reference || policy). k3_weighted: k3 times the importance ratio, with correct value and gradient also
    off policy."""
    reference_model: ModelName | None = None
    """Reference model: a directory, or a name on the Hugging Face hub. None: the initial model of the run."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""

    def conflicts(self) -> Conflicts:
        yield from super().conflicts()
        if self.reference_model is not None and not self.kl_coef:
            yield conflict(
                "`reference_model` has no effect with `kl_coef` = 0",
                hint="set `kl_coef`, or leave `reference_model` out",
            )


class MaskedRatioLossConfig(BaseLossConfig):
    """Importance-weighted policy gradient without tokens of extreme ratios (the default)."""

    type: Literal["masked_ratio"] = "masked_ratio"
    """Name of the loss."""
    mask_ratio_high: PositiveFloat = 8.0
    """Maximum ratio. Tokens with a larger ratio have no gradient."""
    mask_ratio_low: NonNegativeFloat = 0.125
    """Minimum ratio. Tokens with a smaller ratio have no gradient."""

    def conflicts(self) -> Conflicts:
        yield from super().conflicts()
        if self.mask_ratio_low >= self.mask_ratio_high:
            yield conflict(
                f"`mask_ratio_low` = {self.mask_ratio_low:g} is not below `mask_ratio_high` = "
                f"{self.mask_ratio_high:g}, so no token has a gradient",
                hint="lower `mask_ratio_low`, or raise `mask_ratio_high`",
            )


class NormalizedLossConfig(BaseLossConfig):
    """Settings of every loss except the default one."""

    normalization: Normalization = "token"
    """token: mean over all tokens. sequence: mean over the tokens of each sequence, then mean over sequences.
    constant: sum over the tokens of each sequence, divided by `normalization_length`, then mean over
    sequences."""
    normalization_length: PositiveInt | None = None
    """Number of tokens that divides each sum with normalization = "constant". None: the trainer's seq_len."""
    correction: CorrectionConfig | None = None
    """Limits on the importance weights between sampler and trainer. None: no limits."""

    def conflicts(self) -> Conflicts:
        yield from super().conflicts()
        if self.normalization_length is not None and self.normalization != "constant":
            yield conflict(
                f'`normalization_length` has no effect with `normalization` = "{self.normalization}"',
                hint='set `normalization` = "constant", or leave `normalization_length` out',
            )


class ClippedRatioLossConfig(NormalizedLossConfig):
    """PPO's clipping of token-level importance ratios."""

    clip_low: ClipFraction = 0.2
    """Clip the ratio below 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """Clip the ratio above 1 + clip_high."""


class PPOLossConfig(ClippedRatioLossConfig):
    """PPO's clipped ratio."""

    type: Literal["ppo"] = "ppo"
    """Name of the loss."""


class DrGRPOLossConfig(ClippedRatioLossConfig):
    """PPO's clipped ratio. A token has the same weight in a short reply as in a long reply."""

    type: Literal["dr_grpo"] = "dr_grpo"
    """Name of the loss."""
    normalization: Normalization = "constant"
    """token: mean over all tokens. sequence: mean over the tokens of each sequence, then mean over sequences.
    constant: sum over the tokens of each sequence, divided by `normalization_length`, then mean over
    sequences."""


class GSPOLossConfig(NormalizedLossConfig):
    """PPO's clipping of one ratio per sequence: the geometric mean of its tokens' ratios."""

    type: Literal["gspo"] = "gspo"
    """Name of the loss."""
    clip_low: ClipFraction = 3e-4
    """Clip the ratio below 1 - clip_low."""
    clip_high: NonNegativeFloat = 4e-4
    """Clip the ratio above 1 + clip_high."""
    normalization: Normalization = "sequence"
    """token: mean over all tokens. sequence: mean over the tokens of each sequence, then mean over sequences.
    constant: sum over the tokens of each sequence, divided by `normalization_length`, then mean over
    sequences."""


class CISPOLossConfig(NormalizedLossConfig):
    """Policy gradient with a clipped importance weight. Every token keeps its gradient."""

    type: Literal["cispo"] = "cispo"
    """Name of the loss."""
    clip_low: ClipFraction = 1.0
    """Clip the weight below 1 - clip_low. 1: no clipping."""
    clip_high: NonNegativeFloat = 4.0
    """Clip the weight above 1 + clip_high."""

    def conflicts(self) -> Conflicts:
        yield from super().conflicts()
        if isinstance(self.correction, TruncateCorrectionConfig):
            yield conflict(
                "cispo truncates importance weights itself, at 1 + `clip_high`",
                "correction",
                "clip_high",
                hint='leave `correction` out, or set its type to "mask"',
            )


class DecoupledPPOLossConfig(NormalizedLossConfig):
    """PPO's clipping around a policy between the sampler and the current policy.

    The older the weights that sampled a token, the nearer this policy is to the current policy.
    """

    type: Literal["decoupled_ppo"] = "decoupled_ppo"
    """Name of the loss."""
    clip_low: ClipFraction = 0.2
    """Clip the ratio to the proximal policy below 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """Clip the ratio to the proximal policy above 1 + clip_high."""


class ReinforceLossConfig(NormalizedLossConfig):
    """Plain policy gradient without importance weights: for synchronous runs, and as a baseline."""

    type: Literal["reinforce"] = "reinforce"
    """Name of the loss."""

    def conflicts(self) -> Conflicts:
        yield from super().conflicts()
        if isinstance(self.correction, TruncateCorrectionConfig):
            yield conflict(
                "reinforce has no importance weights to truncate",
                "correction",
                hint='leave `correction` out, or use loss.type = "cispo": reinforce with truncated weights',
            )


class CustomLossConfig(NormalizedLossConfig, UserFunctionConfig):
    """User function as the loss."""

    type: Literal["custom"] = "custom"
    """Name of the loss."""


# --- losses with the settings of a paper ---


class GRPOLossConfig(PPOLossConfig):
    """PPO's clipped ratio as in GRPO (arXiv 2402.03300): a mean over sequences, and a KL term."""

    type: Literal["grpo"] = "grpo"  # type: ignore[assignment]
    """Name of the loss."""
    normalization: Normalization = "sequence"
    """token: mean over all tokens. sequence: mean over the tokens of each sequence, then mean over sequences.
    constant: sum over the tokens of each sequence, divided by `normalization_length`, then mean over
    sequences."""
    kl_coef: NonNegativeFloat = 0.04
    """Weight of the KL divergence to the reference model. 0: no reference model."""


class DAPOLossConfig(PPOLossConfig):
    """PPO's clipped ratio as in DAPO (arXiv 2503.14476), with a larger upper than lower clip range."""

    type: Literal["dapo"] = "dapo"  # type: ignore[assignment]
    """Name of the loss."""
    clip_high: NonNegativeFloat = 0.28
    """Clip the ratio above 1 + clip_high."""


class RLOOLossConfig(ReinforceLossConfig):
    """Plain policy gradient as in RLOO (arXiv 2402.14740), for synchronous runs."""

    type: Literal["rloo"] = "rloo"  # type: ignore[assignment]
    """Name of the loss."""


LossConfig = Annotated[
    Annotated[MaskedRatioLossConfig, Tag("masked_ratio")]
    | Annotated[PPOLossConfig, Tag("ppo")]
    | Annotated[DrGRPOLossConfig, Tag("dr_grpo")]
    | Annotated[GSPOLossConfig, Tag("gspo")]
    | Annotated[CISPOLossConfig, Tag("cispo")]
    | Annotated[DecoupledPPOLossConfig, Tag("decoupled_ppo")]
    | Annotated[ReinforceLossConfig, Tag("reinforce")]
    | Annotated[GRPOLossConfig, Tag("grpo")]
    | Annotated[DAPOLossConfig, Tag("dapo")]
    | Annotated[RLOOLossConfig, Tag("rloo")]
    | Annotated[CustomLossConfig, Tag("custom")],
    variant("masked_ratio"),
]
