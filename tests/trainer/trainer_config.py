"""Configurations for the tests; as a script (`torchrun trainer_config.py FILE`) one rank of a trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from buckeye.config.sft import SFTConfig
from buckeye.config.trainer import TrainerConfig

_COMMON = {"optim": {"type": "adamw", "lr": 0.01}, "seq_len": 64, "dist_timeout_seconds": 60}


def trainer_config(model: Path, output_dir: Path, **changes: Any) -> TrainerConfig:
    """A trainer on the CPU with short deadlines."""
    return TrainerConfig.model_validate(_settings(model, output_dir, {"batch_timeout": 60, **changes}))


def sft_config(model: Path, output_dir: Path, **changes: Any) -> SFTConfig:
    """Fine-tuning on the CPU."""
    return SFTConfig.model_validate(_settings(model, output_dir, changes))


def _settings(model: Path, output_dir: Path, changes: dict[str, Any]) -> dict[str, Any]:
    common = {"model": {"name": str(model), "device": "cpu"}, "output_dir": output_dir}
    merged = {**_COMMON, **common, **changes}
    merged["optim"] = {"lr": 0.01, **merged["optim"]}
    return merged


if __name__ == "__main__":
    from buckeye.trainer.rl import run_trainer

    run_trainer(TrainerConfig.model_validate_json(Path(sys.argv[1]).read_text()))
