"""Rank of a trainer that writes how many bytes it read of the data of batches: `counting_rank.py CONFIG`."""

import io
import os
import sys
from pathlib import Path

from buckeye.config.trainer import TrainerConfig
from buckeye.trainer.rl import run_trainer


class CountedFile(io.FileIO):
    read_bytes = 0

    def readinto(self, buffer) -> int:
        count = super().readinto(buffer)
        CountedFile.read_bytes += count
        return count


def open_counted(path: Path, *args, **kwargs):
    return CountedFile(path) if path.name == "batch.safetensors" else open_path(path, *args, **kwargs)


open_path, Path.open = Path.open, open_counted
run_trainer(TrainerConfig.model_validate_json(Path(sys.argv[1]).read_text()))
Path(sys.argv[1]).with_name(f"read_{os.environ['RANK']}").write_text(str(CountedFile.read_bytes))
