"""Canary: a test that a server computes the log-probs that the trainer computes with the same weights.

With every version of the weights, the trainer publishes the greedy continuation of a fixed prompt, and its
log-probs. A server that has loaded these weights must return nearly equal log-probs. The comparison includes
the first token that differs, because both its log-probs are the largest of a distribution. Later log-probs
have different prefixes and are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from buckeye.inference.types import Generation
from buckeye.transport.weights import Canary

TOLERANCE_FLOAT32 = 1e-3
"""Tolerance for the largest log-prob difference, if trainer and engine both compute in float32. Rounding
causes a hundredth of it.
"""
TOLERANCE_HALF = 0.2
"""Tolerance for the mean log-prob difference, if trainer or engine uses lower precision. bfloat16 rounds
logits to 0.4 percent, which changes log-probs of a trained model by 0.05 and more.
"""
_MIN_CHANGE = 0.1
"""Fraction of the tolerance. If new weights change the trainer's log-probs by more, the engine's log-probs
must change too.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryResult:
    """Result of the canary on one server.

    `difference` is the largest log-prob difference if both compute in float32, else the mean difference.
    `problem` is None if the server passed.
    """

    checksum: str
    canary: Canary
    logprobs: list[float]
    difference: float
    problem: str | None


def compare_canary(
    canary: Canary, checksum: str, generation: Generation, *, dtype: str | None, previous: CanaryResult | None
) -> CanaryResult:
    """Compare an engine's reply, computed in `dtype`, with the canary of the weights with `checksum`.

    Also check that the reply differs from `previous`, the result of this server with earlier weights.
    """
    exact = canary.dtype == "float32" and dtype == "float32"
    tolerance = TOLERANCE_FLOAT32 if exact else TOLERANCE_HALF
    differences = _differences(canary, generation)
    difference = max(differences) if exact else sum(differences) / len(differences)
    problem = None
    if len(generation.token_ids) != len(canary.token_ids):
        problem = f"the reply has {len(generation.token_ids)} tokens instead of {len(canary.token_ids)}"
    elif not difference <= tolerance:  # also true for NaN
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
    """Return the absolute log-prob difference of each token, up to the first token that differs."""
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
