"""How large the disk of a rented machine must be for a run."""

from __future__ import annotations

import math

from buckeye.config.rl import RLConfig
from buckeye.launch.preflight.disk import estimate_disk
from buckeye.launch.preflight.model import find_model

SOFTWARE_GB = 60
"""Two environments with torch and CUDA, of which vLLM's is one, their caches, and room to breathe."""

_UNKNOWN_GB = 200  # where the size of the model is not known


def disk_gb(config: RLConfig) -> int:
    """Gigabytes (10^9 bytes): what the run is estimated to write, the model itself, and the software."""
    total = estimate_disk(config, find_model(config.trainer.model.name)).total
    if total is None:
        return _UNKNOWN_GB
    return SOFTWARE_GB + math.ceil(1.2 * total / 1e9)
