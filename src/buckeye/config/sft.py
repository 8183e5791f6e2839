"""Settings of supervised fine-tuning."""

from __future__ import annotations

from pydantic import PositiveInt

from buckeye.config.shared import BaseConfig, TrackedConfig, UserPath
from buckeye.config.trainer import TrainingConfig


class ChatDataConfig(BaseConfig):
    """Conversations to train on: JSON lines {"messages": [{"role": ..., "content": ...}, ...]}."""

    path: UserPath
    """File of conversations to train on."""
    val_path: UserPath | None = None
    """File to measure the validation loss on: before the first step, at each checkpoint, and at the end."""
    val_interval: PositiveInt | None = None
    """Steps between two additional measurements of the validation loss. None: no additional measurements."""
    seed: int = 0
    """Seed of the order of conversations."""


class SFTConfig(TrainingConfig, TrackedConfig):
    """Fine-tuning of a model on conversations."""

    data: ChatDataConfig
    """Conversations to train on."""
    max_steps: PositiveInt | None = None
    """Number of optimizer steps. None: one pass over the data."""
    batch_size: PositiveInt = 32
    """Number of conversations per step."""
    seq_len: PositiveInt = 2048
    """Maximum length of a conversation, in tokens. Longer conversations are dropped."""
    micro_batch_tokens: PositiveInt = 2048
    """Tokens to compute at once, from several conversations. Has an effect only if larger than seq_len."""
