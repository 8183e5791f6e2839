"""Canary: a comparison of a server's log-probs with the trainer's, for equal weights.

With every version of the weights the trainer publishes the greedy continuation of a fixed prompt and its
log-probs. A server that has loaded the weights must return equal values. At the first different token both
log-probs are the largest of their distribution, so they are still compared. Later log-probs are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from buckeye.inference.types import Generation
from buckeye.transport.weights import Canary

TOLERANCE_FLOAT32 = 1e-3
"""Largest log-prob difference if trainer and engine both compute in float32: a hundred times the effect of
rounding.
"""
TOLERANCE_HALF = 0.2
"""Largest mean difference if one of them uses lower precision: bfloat16 rounds logits to 0.4 percent, which
moves log-probs of a trained model by 0.05 and more.
"""
_MIN_CHANGE = 0.1
"""A change of the trainer's log-probs beyond this fraction of the tolerance must change the engine's
log-probs.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryResult:
    """Result of a canary on a server.

    `difference` from the trainer's log-probs is the largest in float32, else the mean.
    """

    checksum: str
    canary: Canary
    logprobs: list[float]
    difference: float
    problem: str | None


def compare_canary(
    canary: Canary, checksum: str, generation: Generation, *, dtype: str | None, previous: CanaryResult | None
) -> CanaryResult:
    """Compare an engine's reply, computed in `dtype`, with the canary of the weights `checksum`.

    Also compare the reply with `previous`, the engine's reply under other weights.
    """
    exact = canary.dtype == "float32" and dtype == "float32"
    tolerance = TOLERANCE_FLOAT32 if exact else TOLERANCE_HALF
    differences = _differences(canary, generation)
    difference = max(differences) if exact else sum(differences) / len(differences)
    problem = None
    if len(generation.token_ids) != len(canary.token_ids):
        problem = f"the reply has {len(generation.token_ids)} tokens instead of {len(canary.token_ids)}"
    elif not difference <= tolerance:  # written so that NaN is a problem too
        problem = (
            f"its log-probs of a fixed prompt differ from the trainer's by {difference:.2g} "
            f"(tolerance {tolerance:g})"
        )
    elif _did_not_change(canary, checksum, generation, previous, tolerance):
        problem = "its log-probs of a fixed prompt did not change with the weights"
    return CanaryResult(
        checksum=checksum,
        canary=canary,
        logprobs=generation.logprobs,
        difference=difference,
        problem=problem,
    )


def _differences(canary: Canary, generation: Generation) -> list[float]:
    """Return the log-prob differences up to and including the first different token."""
    differences = [float("inf")] if not generation.token_ids else []
    pairs = zip(canary.token_ids, generation.token_ids, canary.logprobs, generation.logprobs, strict=False)
    for expected, token, ours, theirs in pairs:
        differences.append(abs(ours - theirs))
        if expected != token:
            break
    return differences


def _did_not_change(
    canary: Canary, checksum: str, generation: Generation, previous: CanaryResult | None, tolerance: float
) -> bool:
    if previous is None or previous.checksum == checksum or previous.logprobs != generation.logprobs:
        return False
    moved = max(abs(a - b) for a, b in zip(canary.logprobs, previous.canary.logprobs, strict=False))
    return moved > _MIN_CHANGE * tolerance
