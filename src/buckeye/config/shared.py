"""Settings that several processes have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from buckeye.config.base import BaseConfig

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Device = Literal["auto", "cpu", "cuda"]

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"


class LogConfig(BaseConfig):
    """What is logged."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is shown."""
    vf_level: Literal["debug", "info", "warn", "warning", "error"] = "warn"
    """Level of the environments' own log lines."""
    file: bool = True
    """Also write `logs/<process>.log`."""
    log_data: bool = False
    """Log the first samples of each batch."""


class LogExtrasConfig(BaseConfig):
    """Tables sent to Weights & Biases."""

    samples: bool = True
    """Rollout texts."""
    distributions: bool = True
    """Reward and advantage distributions."""
    interval: PositiveInt = 10
    """Every how many steps."""


class WandbConfig(BaseConfig):
    """Weights & Biases."""

    project: str = "prime-rl"
    """Project name."""
    name: str | None = None
    """Run name."""
    offline: bool = False
    """Write locally, upload nothing."""
    id: str | None = None
    """Run id to continue."""
    log_extras: LogExtrasConfig | None = None
    """Tables to send as well."""


class SharedCheckpointConfig(BaseConfig):
    """Checkpoints, for trainer and orchestrator alike."""

    interval: PositiveInt | None = 50
    """Save every so many steps."""
    resume_step: Annotated[int, Field(ge=-1)] | None = None
    """Resume from this step; -1 is the newest checkpoint there is."""
    keep: PositiveInt | None = None
    """Keep only so many of the newest checkpoints; None keeps all."""


class SharedModelConfig(BaseConfig):
    """The model, for all processes alike."""

    name: str = DEFAULT_MODEL
    """A local model directory or a Hugging Face id."""


class SharedWeightBroadcastConfig(BaseConfig):
    """How weights reach the engines, for all processes alike."""

    type: Literal["filesystem", "nccl"] = "filesystem"
    """Through files in `weights/`, or through NCCL."""
