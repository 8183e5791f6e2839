"""Settings of the policy-gradient losses; the formulas are in docs/reference/losses.md."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, Tag, model_validator

from buckeye.config.shared import BaseConfig, UserFunctionConfig, conflict, variant

Level = Literal["token", "sequence", "geometric"]
Normalization = Literal["token", "sequence", "constant"]
KlEstimator = Literal["k1", "k2", "k3", "k3_weighted"]
KlMask = Literal["all", "masked", "unmasked"]
ClipFraction = Annotated[float, Field(ge=0, le=1)]


class TruncateCorrectionConfig(BaseConfig):
    """Correction that reduces importance weights above `high` to `high` (truncated importance sampling)."""

    type: Literal["truncate"] = "truncate"
    """How importance weights are corrected."""
    level: Level = "token"
    """The weight of a token, the product over its sequence, or the geometric mean of that."""
    high: PositiveFloat = 5.0
    """The largest weight."""


class MaskCorrectionConfig(BaseConfig):
    """Correction that removes the policy gradient of importance weights outside of [low, high]."""

    type: Literal["mask"] = "mask"
    """How importance weights are corrected."""
    level: Level = "token"
    """The weight of a token, the product over its sequence, or the geometric mean of that."""
    low: NonNegativeFloat = 0.5
    """The smallest weight that counts."""
    high: PositiveFloat = 5.0
    """The largest weight that counts."""

    @model_validator(mode="after")
    def _something_passes(self) -> MaskCorrectionConfig:
        if self.low >= self.high:
            raise conflict(
                f"low = {self.low:g} is not below high = {self.high:g}: nothing would give a gradient",
                "low",
                "high",
            )
        return self


CorrectionConfig = Annotated[
    Annotated[TruncateCorrectionConfig, Tag("truncate")] | Annotated[MaskCorrectionConfig, Tag("mask")],
    variant("truncate"),
]


class BaseLossConfig(BaseConfig):
    """Settings of every loss."""

    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the reference model; 0 does without one."""
    kl_estimator: KlEstimator = "k3"
    """How it is estimated: k2 and k3 are terms of the loss, right on policy only, and k3's gradient that of
    the reverse divergence; k3_weighted is k3 times the ratio, right off policy, too; k1 is taken off the
    advantages."""
    reference_model: str | None = None
    """The reference: a directory or name; None is the model that the run starts from."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy, which is a bonus."""

    @model_validator(mode="after")
    def _reference_is_used(self) -> Self:
        if self.reference_model is not None and not self.kl_coef:
            raise conflict("reference_model has no effect with kl_coef = 0", "reference_model", "kl_coef")
        return self


class MaskedRatioLossConfig(BaseLossConfig):
    """Importance-weighted policy gradient without tokens of extreme ratios (the default)."""

    type: Literal["masked_ratio"] = "masked_ratio"
    """The loss."""
    ratio_type: Literal["token", "sequence"] = "token"
    """Importance ratios of single tokens, or of whole sequences."""
    ratio_length_norm: bool = False
    """Divide a sequence's log-ratio by its length."""
    mask_ratio_high: PositiveFloat = 8.0
    """Tokens with a larger ratio give no gradient."""
    mask_ratio_low: NonNegativeFloat = 0.125
    """Tokens with a smaller ratio give no gradient."""
    sequence_mask_ratio_low: NonNegativeFloat = 0.0
    """Sequences with any ratio below this give no gradient; 0 is off."""
    kl_tau: NonNegativeFloat = 0.0
    """Weight of the log-ratio to the sampler: it makes sampled tokens rarer; see docs/reference/losses.md."""
    kl_mask_type: KlMask = "all"
    """Which tokens that term sees."""

    @model_validator(mode="after")
    def _some_tokens_pass(self) -> MaskedRatioLossConfig:
        if self.mask_ratio_low >= self.mask_ratio_high:
            raise conflict(
                f"mask_ratio_low = {self.mask_ratio_low:g} is not below mask_ratio_high = "
                f"{self.mask_ratio_high:g}: no token would give a gradient",
                "mask_ratio_low",
                "mask_ratio_high",
            )
        return self


class NormalizedLossConfig(BaseLossConfig):
    """Settings of every loss except the default one."""

    normalization: Normalization = "token"
    """Mean over tokens, mean over sequences of their means, or sum divided by a constant per sequence."""
    normalization_length: PositiveInt | None = None
    """That constant, in tokens; None is the trainer's seq_len."""
    correction: CorrectionConfig | None = None
    """Limits on the importance weights between sampler and trainer."""

    @model_validator(mode="after")
    def _length_is_used(self) -> Self:
        if self.normalization_length is not None and self.normalization != "constant":
            raise conflict(
                f'normalization_length has no effect with normalization = "{self.normalization}"',
                "normalization_length",
                "normalization",
            )
        return self


class ClippedRatioLossConfig(NormalizedLossConfig):
    """PPO's clipping of token-level importance ratios."""

    clip_low: ClipFraction = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """With a negative advantage, the ratio is clipped above this too."""


class PPOLossConfig(ClippedRatioLossConfig):
    """PPO's clipped ratio."""

    type: Literal["ppo"] = "ppo"
    """The loss."""


class DrGRPOLossConfig(ClippedRatioLossConfig):
    """PPO's clipped ratio, divided by a constant, so that the length of a reply does not change its
    weight.
    """

    type: Literal["dr_grpo"] = "dr_grpo"
    """The loss."""
    normalization: Normalization = "constant"
    """Mean over tokens, mean over sequences of their means, or sum divided by a constant per sequence."""


class GSPOLossConfig(NormalizedLossConfig):
    """PPO's clipping of one ratio per sequence: the geometric mean of its tokens' ratios."""

    type: Literal["gspo"] = "gspo"
    """The loss."""
    clip_low: ClipFraction = 3e-4
    """The ratio is clipped below 1 - clip_low."""
    clip_high: NonNegativeFloat = 4e-4
    """The ratio is clipped above 1 + clip_high."""
    normalization: Normalization = "sequence"
    """Mean over tokens, mean over sequences of their means, or sum divided by a constant per sequence."""


class CISPOLossConfig(NormalizedLossConfig):
    """Policy gradient with a clipped importance weight: every token keeps its gradient."""

    type: Literal["cispo"] = "cispo"
    """The loss."""
    clip_low: ClipFraction = 1.0
    """The weight is clipped below 1 - clip_low; 1 does not."""
    clip_high: NonNegativeFloat = 4.0
    """The weight is clipped above 1 + clip_high."""

    @model_validator(mode="after")
    def _truncates_once(self) -> Self:
        if isinstance(self.correction, TruncateCorrectionConfig):
            raise conflict(
                "cispo truncates importance weights by itself, at 1 + clip_high; leave the correction out, "
                'or set its type to "mask"',
                "correction",
                "clip_high",
            )
        return self


class DPPOLossConfig(NormalizedLossConfig):
    """Importance-weighted policy gradient without tokens with a large change of probability."""

    type: Literal["dppo"] = "dppo"
    """The loss."""
    mask_low: ClipFraction = 0.2
    """Tokens to be made rarer give no gradient if their probability has already fallen by more."""
    mask_high: ClipFraction = 0.2
    """Tokens to be made likelier give no gradient if their probability has already risen by more."""
    kl_tau: NonNegativeFloat = 1e-3
    """Weight of the squared log-ratio to the sampler."""


class DecoupledPPOLossConfig(NormalizedLossConfig):
    """PPO's clipping around a proximal policy, which is interpolated between sampler and current policy by
    staleness.
    """

    type: Literal["decoupled_ppo"] = "decoupled_ppo"
    """The loss."""
    clip_low: ClipFraction = 0.2
    """The ratio to the proximal policy is clipped below 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio to the proximal policy is clipped above 1 + clip_high."""


class ReinforceLossConfig(NormalizedLossConfig):
    """Plain policy gradient without importance weights: for synchronous runs, and as a baseline."""

    type: Literal["reinforce"] = "reinforce"
    """The loss."""

    @model_validator(mode="after")
    def _has_no_weights(self) -> ReinforceLossConfig:
        if isinstance(self.correction, TruncateCorrectionConfig):
            raise conflict(
                "reinforce has no importance weights to truncate; cispo is this loss with truncated weights",
                "correction.type",
            )
        return self


class CustomLossConfig(NormalizedLossConfig, UserFunctionConfig):
    """User function as the loss."""

    type: Literal["custom"] = "custom"
    """The loss."""


# --- recipes: the losses above, with the settings of a paper ---


class GRPOLossConfig(PPOLossConfig):
    """PPO's clipped ratio as in GRPO (arXiv 2402.03300): a mean over sequences, and a KL term."""

    type: Literal["grpo"] = "grpo"  # type: ignore[assignment]
    """The loss."""
    normalization: Normalization = "sequence"
    """Mean over tokens, mean over sequences of their means, or sum divided by a constant per sequence."""
    kl_coef: NonNegativeFloat = 0.04
    """Weight of the KL divergence to the reference model; 0 does without one."""


class DAPOLossConfig(PPOLossConfig):
    """PPO's clipped ratio as in DAPO (arXiv 2503.14476): clipped higher above than below."""

    type: Literal["dapo"] = "dapo"  # type: ignore[assignment]
    """The loss."""
    clip_high: NonNegativeFloat = 0.28
    """The ratio is clipped above 1 + clip_high."""


class RLOOLossConfig(ReinforceLossConfig):
    """Plain policy gradient as in RLOO (arXiv 2402.14740), for synchronous runs."""

    type: Literal["rloo"] = "rloo"  # type: ignore[assignment]
    """The loss."""


class TISLossConfig(CISPOLossConfig):
    """Policy gradient with importance weights of at most 2: truncated importance sampling."""

    type: Literal["tis"] = "tis"  # type: ignore[assignment]
    """The loss."""
    clip_high: NonNegativeFloat = 1.0
    """The weight is clipped above 1 + clip_high."""


class IcePopLossConfig(MaskedRatioLossConfig):
    """Importance-weighted policy gradient with the limits of IcePop (arXiv 2510.18855)."""

    type: Literal["icepop"] = "icepop"  # type: ignore[assignment]
    """The loss."""
    mask_ratio_high: PositiveFloat = 5.0
    """Tokens with a larger ratio give no gradient."""
    mask_ratio_low: NonNegativeFloat = 0.5
    """Tokens with a smaller ratio give no gradient."""


class AReaLLossConfig(DecoupledPPOLossConfig):
    """Decoupled PPO as in AReaL (arXiv 2505.24298): tokens with a weight above 5 give no gradient."""

    type: Literal["areal"] = "areal"  # type: ignore[assignment]
    """The loss."""
    correction: CorrectionConfig | None = MaskCorrectionConfig(low=0.0, high=5.0)
    """Limits on the importance weights between sampler and trainer."""


LossConfig = Annotated[
    Annotated[MaskedRatioLossConfig, Tag("masked_ratio")]
    | Annotated[PPOLossConfig, Tag("ppo")]
    | Annotated[DrGRPOLossConfig, Tag("dr_grpo")]
    | Annotated[GSPOLossConfig, Tag("gspo")]
    | Annotated[CISPOLossConfig, Tag("cispo")]
    | Annotated[DPPOLossConfig, Tag("dppo")]
    | Annotated[DecoupledPPOLossConfig, Tag("decoupled_ppo")]
    | Annotated[ReinforceLossConfig, Tag("reinforce")]
    | Annotated[GRPOLossConfig, Tag("grpo")]
    | Annotated[DAPOLossConfig, Tag("dapo")]
    | Annotated[RLOOLossConfig, Tag("rloo")]
    | Annotated[TISLossConfig, Tag("tis")]
    | Annotated[IcePopLossConfig, Tag("icepop")]
    | Annotated[AReaLLossConfig, Tag("areal")]
    | Annotated[CustomLossConfig, Tag("custom")],
    variant("masked_ratio"),
]
