"""Disk size of a rented machine for a run."""

from __future__ import annotations

import math

from buckeye.config.rl import RLConfig
from buckeye.launch.preflight.disk import estimate_disk
from buckeye.launch.preflight.model import find_model

SOFTWARE_GB = 60
"""Two environments with torch and CUDA (Buckeye's and vLLM's), their caches, and a reserve."""

_UNKNOWN_GB = 200  # if the size of the model is unknown


def disk_gb(config: RLConfig) -> int:
    """Return the gigabytes (10^9 bytes) for the files of the run, the model and the software."""
    total = estimate_disk(config, find_model(config.trainer.model.name)).total
    if total is None:
        return _UNKNOWN_GB
    return SOFTWARE_GB + math.ceil(1.2 * total / 1e9)
