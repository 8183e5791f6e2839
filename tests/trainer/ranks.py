"""Ranks of a trainer, each in its own process."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.ports import free_port

SCRIPT = Path(__file__).parent / "trainer_config.py"


def start_ranks(ranks: int, *words: str, attempt: int = 1, last_rank: Mapping[str, str] | None = None):
    """Start a Python command once per rank, with the variables that `torchrun` sets."""
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"OMP_NUM_THREADS": "1", "BUCKEYE_THREADS": "1", "BUCKEYE_ATTEMPT": str(attempt)}
    others = [{}] * (ranks - 1)
    return [
        subprocess.Popen([sys.executable, *words], env={**os.environ, **common, **special, "RANK": str(rank)})
        for rank, special in enumerate([*others, last_rank or {}])
    ]


def launch(ranks: int, *words: str, **settings) -> None:
    """Run the ranks until they exit; assert that each exits with 0."""
    processes = start_ranks(ranks, *words, **settings)
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * ranks
