"""Advice for a run whose policy collapsed: the commands of a rollback."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from buckeye.base.columns import quoted
from buckeye.base.storage import read_json
from buckeye.transport.checkpoint import list_checkpoints

_SLOWER = 10.0


def rollback_advice(run: Path, since: int) -> str:
    """Return the commands that roll back a policy that collapsed at step `since`.

    The commands fork the run from the newest checkpoint before the collapse, with a tenth of the learning
    rate.
    """
    rate = _rate(run)
    flag = f"--trainer.optim.lr {rate / _SLOWER:.3g}" if rate is not None else "a tenth of trainer.optim.lr"
    before = [info.step for info in list_checkpoints(run / "checkpoints") if 0 < info.step <= since]
    if not before:
        return (
            f"start again with {flag}, because no earlier checkpoint exists; `buckeye rl tune` finds a "
            "learning rate"
        )
    step, name = max(before), quoted(run)
    forked = shlex.quote(f"{run}-from-step-{step}")
    return f"`buckeye rl fork {name} --step {step}`, then `buckeye rl resume {forked} {flag}`"


def _rate(run: Path) -> float | None:
    """Return the recorded learning rate, or None."""
    try:
        settings: Any = read_json(run / "configs" / "rl.json")
        return float(settings["trainer"]["optim"]["lr"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
