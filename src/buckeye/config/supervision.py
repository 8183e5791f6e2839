"""Settings of the supervision of a run's processes."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat

from buckeye.config.shared import BaseConfig


class SupervisionConfig(BaseConfig):
    """Timeouts of unresponsive processes, and limits on restarts."""

    restart: bool = True
    """Restart processes that end or stall: a server alone, trainer and orchestrator from the newest
    checkpoint. False: end the run."""
    max_restarts: NonNegativeInt = 5
    """Maximum number of restarts within restart_window. A new checkpoint resets the count."""
    restart_window: PositiveFloat = 600.0
    """Seconds after which a restart no longer counts."""
    heartbeat_timeout: PositiveFloat = 30.0
    """Seconds without a heartbeat after which a process is killed and restarted."""
    stall_timeout: PositiveFloat = 1800.0
    """Seconds without progress after which a process is killed and restarted, unless it waits for another
    one. After half of it without a step, the run logs what each process waits for."""
    start_timeout: PositiveFloat = 600.0
    """Seconds from the start of a process to its first heartbeat."""
