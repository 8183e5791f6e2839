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
    """File of conversations to train on."""
    val_path: Path | None = None
    """File to measure the loss on: before the first step, at each checkpoint, and at the end."""
    val_interval: PositiveInt | None = None
    """Steps between two additional measurements."""
    seed: int = 0
    """Seed of the order of conversations."""


class SFTConfig(TrackedConfig):
    """Fine-tuning of a model on conversations."""

    data: ChatDataConfig
    """Conversations to train on."""
    model: ModelConfig = ModelConfig()
    """Model to train."""
    optim: OptimizerConfig = AdamWConfig()
    """Optimizer."""
    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    """Schedule of the learning rate."""
    ckpt: TrainerCheckpointConfig | None = TrainerCheckpointConfig()
    """Checkpoints at an interval. None: one at the end only."""
    log: LogConfig = LogConfig()
    """Logging."""
    wandb: WandbConfig | None = None
    """Log to Weights & Biases."""
    output_dir: Path = Path("outputs")
    """Output directory."""
    max_steps: PositiveInt | None = None
    """Number of optimizer steps. None: one pass over the data."""
    batch_size: PositiveInt = 32
    """Number of conversations per step."""
    seq_len: PositiveInt = 2048
    """Maximum length of a conversation, in tokens. Longer ones are dropped."""
    micro_batch_tokens: PositiveInt = 2048
    """Tokens of several conversations to compute at once, if more than seq_len."""
    seed: int = 0
    """Seed of the trainer."""
    dist_timeout_seconds: PositiveInt = 600
    """Timeout of collective operations between ranks, in seconds."""

    @model_validator(mode="after")
    def _optimizer_fits(self) -> SFTConfig:
        check_optimizer(self.optim, self.model)
        return self
