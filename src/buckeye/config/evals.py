"""Settings of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from buckeye.config.base import BaseConfig
from buckeye.config.environments import AllOrCount, EnvConfig
from buckeye.config.shared import ClientConfig, EvalSamplingConfig, LogConfig, PolicyModelConfig


class MeasuredEnvConfig(EnvConfig):
    """An environment to measure a model on."""

    split: str | None = None
    """Which of its tasks; None is eval, or train where it has no eval tasks."""
    num_examples: AllOrCount = -1
    """How many of them; -1 is all."""
    rollouts_per_example: PositiveInt = 1
    """How many rollouts of each."""


class EvalsConfig(BaseConfig):
    """Measures a model on environments."""

    env: Annotated[list[MeasuredEnvConfig], Field(min_length=1)] = [MeasuredEnvConfig()]
    """The environments."""
    model: PolicyModelConfig = PolicyModelConfig()
    """The model."""
    client: ClientConfig | None = None
    """A server that serves it; None starts one."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """How it samples."""
    seq_len: PositiveInt = 2048
    """Longest rollout in tokens, prompt included."""
    max_concurrent: PositiveInt | None = None
    """Most rollouts at a time; None is no limit."""
    rollout_timeout: PositiveFloat = 600.0
    """Seconds that a rollout may take."""
    seed: int = 0
    """Seed of the sampling."""
    log: LogConfig = LogConfig()
    """What is logged."""
    output_dir: Path = Path("outputs")
    """Where `evals/` is written."""
