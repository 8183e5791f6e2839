"""Timer on the machine: it ends a run after the command that follows the run is lost."""

from __future__ import annotations

import os
from typing import Any

from buckeye.errors import UsageError
from buckeye.remote.providers.prime_account import prime_account
from buckeye.remote.rental import RentedPod

DEAD_MAN_VARIABLE = "BUCKEYE_DEAD_MAN_MINUTES"

_MINUTES = 30.0
_GRACE_SECONDS = 900.0


def dead_man_timer(pod: RentedPod, minutes: float, *, is_rental: bool) -> dict[str, Any]:
    """Return the settings of the timer, which `pod.watchdog` reads."""
    return {
        "seconds": 60 * minutes,
        "expires": pod.expires,
        "grace": _GRACE_SECONDS,
        "machine": {"url": f"{prime_account().url}/api/v1/pods/{pod.id}"} if is_rental else None,
    }


def dead_man_minutes() -> float:
    """Return the minutes without a heartbeat until the timer acts. Raises UsageError for a wrong value."""
    text = os.environ.get(DEAD_MAN_VARIABLE, str(_MINUTES))
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < 60 * 24 * 7:
        raise UsageError(
            f"{DEAD_MAN_VARIABLE}={text} is not a number of minutes", code="BK-CONFIG-VALUE", hint="write 30"
        )
    return minutes
