"""Whether a process hangs. Pure: what is known of it, limits and the time go in, a verdict comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from buckeye.config.rl import SupervisionConfig

Illness = Literal["not_started", "silent", "stalled", "blocked"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Vitals:
    """What the launcher knows of a process, in seconds on the monotonic clock: when it was `started`, when
    its last sign of life came (None: never), when it last `progressed`, on which kind of process it waits
    (None: it works), and when its event loop last turned (None: it has none)."""

    started: float
    heard: float | None
    progressed: float
    waits_on: str | None
    pulse: float | None


def illness(vitals: Vitals, limits: SupervisionConfig, now: float) -> Illness | None:
    """What is wrong with a process; None if nothing is.

    "not_started": no first sign of life; "silent": none any more (it is suspended, or hangs for good);
    "stalled": it works and gets nowhere; "blocked": its event loop does not turn.
    """
    if vitals.heard is None:
        return "not_started" if now - vitals.started > limits.start_timeout else None
    if now - vitals.heard > limits.heartbeat_timeout:
        return "silent"
    if vitals.waits_on is None and now - vitals.progressed > limits.stall_timeout:
        return "stalled"
    if vitals.pulse is not None and now - vitals.pulse > limits.stall_timeout:
        return "blocked"
    return None


def described(ill: Illness, vitals: Vitals, doing: str, now: float) -> str:
    """`gave no sign of life for 31 s`, to be put after the name of the process."""
    if ill == "not_started":
        return f"gave no first sign of life within {now - vitals.started:.0f} s of its start"
    if ill == "silent":
        return f"gave no sign of life for {now - (vitals.heard or now):.0f} s (it said last: {doing})"
    if ill == "stalled":
        return f"made no progress for {now - vitals.progressed:.0f} s (it said last: {doing})"
    return f"was blocked for {now - (vitals.pulse or now):.0f} s by code that does not await (at: {doing})"
