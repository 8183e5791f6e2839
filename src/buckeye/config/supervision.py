"""Settings of the supervision of a run's processes."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat

from buckeye.config.shared import BaseConfig


class SupervisionConfig(BaseConfig):
    """Timeouts of unresponsive processes, and limits on restarts."""

    restart: bool = True
    """Start again what dies or hangs: a server by itself, trainer and orchestrator from the newest
    checkpoint. False ends the run."""
    max_restarts: NonNegativeInt = 5
    """How often in a row, within restart_window. Every new checkpoint resets the count."""
    restart_window: PositiveFloat = 600.0
    """Seconds after which an end is forgotten."""
    heartbeat_timeout: PositiveFloat = 30.0
    """Seconds without a sign of life after which a process is killed and started again."""
    stall_timeout: PositiveFloat = 1800.0
    """Seconds without progress, of a process that waits for nobody, after which it is killed and started
    again; after half as many without a step of the run, who waits for whom is printed."""
    start_timeout: PositiveFloat = 600.0
    """Seconds from the start of a process to its first sign of life."""
