"""Reward of a rollout from its parts."""

from __future__ import annotations

from collections.abc import Mapping

from buckeye.mcp.config import WeightsConfig


def score(components: Mapping[str, float], weights: WeightsConfig) -> float:
    """Return the weighted mean of the components.

    Weights need not sum to 1: 8, 1, 1 gives the same reward as 0.8, 0.1, 0.1. `components` must have exactly
    the names of the weights, because a missing component does not count as 0.
    """
    shares = weights.model_dump()
    assert components.keys() == shares.keys(), "a component is missing or unknown"
    return sum(shares[name] * components[name] for name in shares) / sum(shares.values())
