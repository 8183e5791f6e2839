"""Trainer configurations for the tests; run one rank as a script (`torchrun trainer_config.py FILE`)."""

import sys
from pathlib import Path
from typing import Any

from buckeye.config.sft import SFTConfig
from buckeye.config.trainer import TrainerConfig

_COMMON = {"optim": {"type": "adamw", "lr": 0.01}, "seq_len": 64, "dist_timeout_seconds": 600}


def trainer_config(name: Path, output_dir: Path, **changes: Any) -> TrainerConfig:
    """Return the settings of a trainer of the model in directory `name`, on the CPU."""
    return TrainerConfig.model_validate(_settings(name, output_dir, {"batch_timeout": 600, **changes}))


def sft_config(name: Path, output_dir: Path, **changes: Any) -> SFTConfig:
    """Return the settings of fine-tuning on the CPU."""
    return SFTConfig.model_validate(_settings(name, output_dir, changes))


def _settings(name: Path, output_dir: Path, changes: dict[str, Any]) -> dict[str, Any]:
    merged = {**_COMMON, "output_dir": output_dir, **changes}
    merged["model"] = {"name": str(name), "device": "cpu", **changes.get("model", {})}
    merged["optim"] = {"lr": 0.01, **merged["optim"]}
    return merged


if __name__ == "__main__":
    from buckeye.trainer.rl import run_trainer

    run_trainer(TrainerConfig.model_validate_json(Path(sys.argv[1]).read_text()))
