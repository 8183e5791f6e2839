"""Settings of a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from buckeye.config.base import BaseConfig
from buckeye.config.inference import InferenceConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.shared import (
    LogConfig,
    PositiveInt,
    SharedCheckpointConfig,
    SharedModelConfig,
    SharedWeightBroadcastConfig,
    WandbConfig,
)
from buckeye.config.trainer import TrainerConfig


class RLConfig(BaseConfig):
    """A run: inference, orchestrator and trainer. What is set here holds for all three."""

    aliases: ClassVar[dict[str, str]] = {"async_level": "max_async_level"}

    trainer: TrainerConfig = TrainerConfig()
    """The trainer."""
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    """The orchestrator."""
    inference: InferenceConfig | None = None
    """The engines; None uses servers that run already (`orchestrator.client`)."""
    inference_gpu_ids: Annotated[list[int], Field(min_length=1)] = [0]
    """GPUs, or CPU slots, of the engines."""
    trainer_gpu_ids: Annotated[list[int], Field(min_length=1)] = [1]
    """GPUs, or CPU slots, of the trainer: one rank each."""
    output_dir: Path = Path("outputs")
    """The run directory."""
    resume: bool = False
    """Continue from the newest checkpoint; the same as ckpt.resume_step = -1."""
    clean: bool = False
    """Delete what an earlier run left in the run directory."""
    dry_run: bool = False
    """Show the resolved configuration and the processes; start and write nothing."""
    log: LogConfig = LogConfig()
    """What is logged."""
    ckpt: SharedCheckpointConfig | None = None
    """Checkpoints."""
    wandb: WandbConfig | None = None
    """Weights & Biases."""
    model: SharedModelConfig | None = None
    """The model."""
    max_steps: PositiveInt | None = None
    """Train until this step."""
    max_model_len: PositiveInt | None = None
    """Longest context of the engines."""
    max_async_level: Annotated[int, Field(ge=0)] | None = None
    """How many steps the rollouts may lag behind; 0 is synchronous."""
    bench: bool = False
    """Measure speed on random tokens."""
    weight_broadcast: SharedWeightBroadcastConfig | None = None
    """How weights reach the engines."""
