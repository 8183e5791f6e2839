"""The canary: compare what a server computes with what the trainer computes with the same weights.

With every version of the weights the trainer publishes the tokens that follow a fixed prompt greedily, and
their log-probs. A server that has loaded the weights must give the same; where the two pick different
tokens, the log-probs of their picks are both the largest and so still comparable, and what follows is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from buckeye.inference.types import Generation
from buckeye.transport.weights import Canary

TOLERANCE_FLOAT32 = 1e-3
"""Largest difference of a log-prob where trainer and engine both compute in float32: a hundred times what
rounding does to it."""
TOLERANCE_HALF = 0.2
"""Largest mean difference where one of them computes in less: bfloat16 rounds logits to 0.4 percent, which
moves log-probs of a trained model by 0.05 and more."""
_SAME = 0.1
"""A change of the trainer's log-probs beyond this part of the tolerance must show in the engine's bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """What a server answered to a canary. `difference` is from the trainer's log-probs: the largest in
    float32, else the mean."""

    checksum: str
    canary: Canary
    logprobs: list[float]
    difference: float
    problem: str | None


def listen(
    canary: Canary, checksum: str, generation: Generation, *, dtype: str | None, before: Heard | None
) -> Heard:
    """Compare an engine's answer, computed in `dtype`, with the canary of the weights `checksum`, and with
    its answer `before`, under other weights."""
    exact = canary.dtype == "float32" and dtype == "float32"
    tolerance = TOLERANCE_FLOAT32 if exact else TOLERANCE_HALF
    differences = _differences(canary, generation)
    difference = max(differences) if exact else sum(differences) / len(differences)
    problem = None
    if len(generation.token_ids) != len(canary.token_ids):
        problem = f"{len(generation.token_ids)} tokens came for {len(canary.token_ids)}"
    elif not difference <= tolerance:  # so that a difference that is no number is a problem too
        problem = (
            f"its log-probs of a fixed prompt differ from the trainer's by {difference:.2g} "
            f"(at most {tolerance:g} is rounding)"
        )
    elif _stuck(canary, checksum, generation, before, tolerance):
        problem = "the weights changed and its log-probs did not move at all"
    return Heard(
        checksum=checksum,
        canary=canary,
        logprobs=generation.logprobs,
        difference=difference,
        problem=problem,
    )


def _differences(canary: Canary, generation: Generation) -> list[float]:
    """Of the log-probs up to the first token that the two disagree about, that one included."""
    found = [float("inf")] if not generation.token_ids else []
    pairs = zip(canary.token_ids, generation.token_ids, canary.logprobs, generation.logprobs, strict=False)
    for expected, token, ours, theirs in pairs:
        found.append(abs(ours - theirs))
        if expected != token:
            break
    return found


def _stuck(
    canary: Canary, checksum: str, generation: Generation, before: Heard | None, tolerance: float
) -> bool:
    if before is None or before.checksum == checksum or before.logprobs != generation.logprobs:
        return False
    moved = max(abs(a - b) for a, b in zip(canary.logprobs, before.canary.logprobs, strict=False))
    return moved > _SAME * tolerance
