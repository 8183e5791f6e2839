"""Settings of how a run treats the disk."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from buckeye.config.base import BaseConfig


class DiskConfig(BaseConfig):
    """How much disk must be free, and what happens when it is not."""

    check: bool = True
    """Refuse to start a run whose weights and checkpoints do not fit on the disk."""
    reserve: NonNegativeInt | None = None
    """Bytes that weights, checkpoints, batches and rollouts leave free, for logs and metrics; None is 1 % of
    the file system, at most 256 MB."""
    timeout: PositiveFloat = 86400.0
    """Seconds that a run whose disk is full waits for space before it ends."""
    keep_logs: PositiveInt | None = None
    """Of how many earlier attempts the logs remain; None keeps all."""
