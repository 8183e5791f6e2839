"""Turns of one engine and one trainer on one device."""

from __future__ import annotations

import os
from dataclasses import dataclass

TURNS_VARIABLE = "BUCKEYE_TURNS"
"""Variable that the launcher sets for the processes of a run with `colocate`: what leaves the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """Data that leaves the device in the turn of the other process.

    `weights` are those of the engine, and `optimizer` is the optimizer state of the trainer.
    """

    weights: bool
    optimizer: bool

    @property
    def setting(self) -> str:
        """Value of `colocate_offload`."""
        return {(0, 0): "none", (1, 0): "weights", (0, 1): "optimizer"}.get(
            (self.weights, self.optimizer), "both"
        )


def turns() -> Turns | None:
    """Return the turns of this process, or None if it does not share its device."""
    offloaded = os.environ.get(TURNS_VARIABLE)
    if offloaded is None:
        return None
    return Turns(weights=offloaded in ("weights", "both"), optimizer=offloaded in ("optimizer", "both"))
