"""The reward of a rollout from its parts."""

from __future__ import annotations

from collections.abc import Mapping

from buckeye.mcp.config import WeightsConfig


def score(components: Mapping[str, float], weights: WeightsConfig) -> float:
    """The weighted mean of the components.

    Weights need not add up to 1: with 8, 1, 1 the reward is the same as with 0.8, 0.1, 0.1. `components`
    must have exactly the names of the weights: a part that is not known is no part that is 0.
    """
    shares = weights.model_dump()
    assert components.keys() == shares.keys(), "a component is missing or unknown"
    return sum(shares[name] * components[name] for name in shares) / sum(shares.values())
