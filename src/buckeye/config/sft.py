"""Settings of supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveInt, model_validator

from buckeye.config.shared import BaseConfig, LogConfig, TrackedConfig, WandbConfig
from buckeye.config.trainer import (
    AdamWConfig,
    ConstantSchedulerConfig,
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TrainerCheckpointConfig,
    check_optimizer,
)


class ChatDataConfig(BaseConfig):
    """Conversations to train on: JSON lines {"messages": [{"role": ..., "content": ...}, ...]}."""

    path: Path
    """The file to train on."""
    val_path: Path | None = None
    """A file to measure the loss on: before the first step, at every checkpoint and at the end."""
    val_interval: PositiveInt | None = None
    """Steps between two further measurements."""
    seed: int = 0
    """Seed of the order."""


class SFTConfig(TrackedConfig):
    """Fine-tuning of a model on conversations."""

    data: ChatDataConfig
    """Conversations to learn."""
    model: ModelConfig = ModelConfig()
    """The model to train and how it is run."""
    optim: OptimizerConfig = AdamWConfig()
    """The optimizer."""
    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    """The shape of the learning rate."""
    ckpt: TrainerCheckpointConfig | None = TrainerCheckpointConfig()
    """Checkpoints at an interval; None writes one at the end only."""
    log: LogConfig = LogConfig()
    """What is logged."""
    wandb: WandbConfig | None = None
    """Log to Weights & Biases."""
    output_dir: Path = Path("outputs")
    """Where everything is written."""
    max_steps: PositiveInt | None = None
    """Optimizer steps; None is one pass over the data."""
    batch_size: PositiveInt = 32
    """Conversations in a step."""
    seq_len: PositiveInt = 2048
    """Longest conversation in tokens; longer ones are left out."""
    micro_batch_tokens: PositiveInt = 2048
    """Tokens of several conversations that are computed at once, where they are more than seq_len."""
    seed: int = 0
    """Seed of the trainer's own randomness."""
    dist_timeout_seconds: PositiveInt = 600
    """Seconds that ranks wait for each other."""

    @model_validator(mode="after")
    def _optimizer_fits(self) -> SFTConfig:
        check_optimizer(self.optim, self.model)
        return self
