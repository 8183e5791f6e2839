"""Settings of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from buckeye.config.base import BaseConfig
from buckeye.config.orchestrator import ClientConfig, EvalSamplingConfig, OrchestratorModelConfig
from buckeye.config.shared import LogConfig, PositiveInt


class EvalsEnvConfig(BaseConfig):
    """An environment to evaluate on."""

    id: str
    """`owner/name`, `name`, `owner/name@version`, or a local path."""
    args: dict[str, Any] = {}
    """Arguments of its `load_environment`."""
    name: str | None = None
    """Name of its result files; the environment's own by default."""
    split: str = "eval"
    """Which of its tasks."""
    num_examples: Annotated[int, Field(ge=-1)] = -1
    """How many tasks; -1 is all."""
    rollouts_per_example: PositiveInt = 1
    """Rollouts of each task."""


class EvalsConfig(BaseConfig):
    """Evaluate a model on environments."""

    env: Annotated[list[EvalsEnvConfig], Field(min_length=1)]
    """The environments, `[[env]]`."""
    model: OrchestratorModelConfig = OrchestratorModelConfig()
    """The model."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """How to sample; temperature 0 is greedy."""
    client: ClientConfig | None = None
    """A running server to use; None starts one."""
    seq_len: PositiveInt = 2048
    """Longest sample in tokens, prompt included."""
    max_concurrent: PositiveInt | None = None
    """Rollouts in flight at most."""
    rollout_timeout: Annotated[float, Field(gt=0.0)] = 600.0
    """Seconds that a rollout may take."""
    seed: int = 0
    """Seed of sampling."""
    log: LogConfig = LogConfig()
    """What is logged."""
    output_dir: Path = Path("outputs")
    """Results go to `evals/` in it."""
