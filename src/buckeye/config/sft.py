"""Settings of supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from buckeye.config.base import BaseConfig
from buckeye.config.shared import LogConfig, PositiveInt, WandbConfig
from buckeye.config.trainer import (
    AdamWConfig,
    ConstantSchedulerConfig,
    OptimizerConfig,
    SchedulerConfig,
    TrainerCheckpointConfig,
    TrainerModelConfig,
)


class SFTDataConfig(BaseConfig):
    """The chats to learn from."""

    path: Path
    """JSON Lines, each `{"messages": [...]}`; the assistant's turns are learned."""
    val_path: Path | None = None
    """Chats for the validation loss."""
    seed: int = 0
    """Seed of their order."""


class SFTConfig(BaseConfig):
    """Fine-tuning on packed chats."""

    data: SFTDataConfig
    """The chats."""
    model: TrainerModelConfig = TrainerModelConfig()
    """The model to start from."""
    optim: OptimizerConfig = AdamWConfig(lr=1e-5)
    """The optimizer."""
    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    """The learning-rate schedule."""
    ckpt: TrainerCheckpointConfig | None = None
    """Checkpoints at an interval. Without it there is one on the way out."""
    log: LogConfig = LogConfig()
    """What is logged."""
    wandb: WandbConfig | None = None
    """Weights & Biases."""
    output_dir: Path = Path("outputs")
    """The run directory."""
    max_steps: PositiveInt | None = None
    """Stop at this step; None is one pass over the data."""
    batch_size: PositiveInt = 32
    """Chats of a step."""
    seq_len: PositiveInt = 2048
    """Tokens of a packed micro-batch, and of the longest chat."""
    seed: int = 0
    """Seed of everything random."""
    dist_timeout_seconds: Annotated[int, Field(gt=0)] = 600
    """Seconds that ranks wait for each other."""
