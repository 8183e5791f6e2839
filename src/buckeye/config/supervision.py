"""Settings of the supervision of a run's processes."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat

from buckeye.config.shared import BaseConfig


class SupervisionConfig(BaseConfig):
    """Timeouts of unresponsive processes, and limits on restarts."""

    restart: bool = True
    """Restart processes that fail or stall. A server restarts alone. Trainer and orchestrator restart
    together, from the newest checkpoint. False: end the run."""
    max_restarts: NonNegativeInt = 5
    """Maximum number of restarts within restart_window. A new checkpoint resets the count."""
    restart_window: PositiveFloat = 600.0
    """Seconds after which a restart no longer counts."""
    heartbeat_timeout: PositiveFloat = 30.0
    """Seconds without a heartbeat after which a process is killed and restarted."""
    stall_timeout: PositiveFloat = 1800.0
    """Seconds without progress after which a process is killed and restarted, unless it waits for another
    process. If no step finishes in half of this time, the run logs the wait of each process."""
    start_timeout: PositiveFloat = 600.0
    """Maximum seconds from the start of a process to its first heartbeat."""
