"""Canary: a test that a server computes the log-probs that the trainer computes with the same weights.

With every version of the weights, the trainer publishes the greedy continuation of a fixed prompt, and its
log-probs. A server that has loaded these weights must return nearly equal log-probs. The comparison includes
the first token that differs, because both its log-probs are the largest of a distribution. Later log-probs
have different prefixes and are not compared.

The limit depends on the dtypes, and on the difference at the first comparison of the run, when a checksum has
proved that both have equal weights. A difference above the limit is a warning, and one far above it a
problem.
"""

from __future__ import annotations

from dataclasses import dataclass

from buckeye.inference.types import Generation
from buckeye.transport.weights import Canary

_TOLERANCES = {"float32": 1e-3, "float16": 0.025}
_TOLERANCE = 0.2
"""Tolerances by dtype. In float32 it is for the largest log-prob difference; rounding causes a hundredth.
Otherwise it is for the mean, and 51 times the rounding error. bfloat16 rounds logits to 0.4 percent, which
changes log-probs of a trained model by 0.05 and more.
"""
_SPREAD = 3.0  # the limit is at least this multiple of the difference at the first comparison
_PROBLEM, _FAR = 4.0, 2.0  # a problem is above these multiples of the tolerance and of the limit
_MIN_CHANGE = 0.1
"""Fraction of the tolerance. If new weights change the trainer's log-probs by more, the engine's log-probs
must change too.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryResult:
    """Result of the canary on one server.

    - `canary`: that of the newest version that changed the server's log-probs
    - `difference`: largest log-prob difference if both compute in float32, else the mean difference
    - `first_difference`: the difference when this server passed for the first time, or None
    - `warning`: a difference that rounding may explain, or None
    - `problem`: None if the server passed
    """

    checksum: str
    canary: Canary
    logprobs: list[float]
    difference: float
    first_difference: float | None
    warning: str | None
    problem: str | None


def compare_canary(
    canary: Canary, checksum: str, generation: Generation, *, dtype: str | None, previous: CanaryResult | None
) -> CanaryResult:
    """Compare an engine's reply, computed in `dtype`, with the canary of the weights with `checksum`.

    Also check that the reply differs from `previous`, the result of this server with earlier weights.
    """
    exact = canary.dtype == "float32" and dtype == "float32"
    tolerance = max(_TOLERANCES.get(name or "", _TOLERANCE) for name in (canary.dtype, dtype))
    first = None if previous is None else previous.first_difference
    limit = max(tolerance, _SPREAD * (first or 0.0))
    differences = _differences(canary, generation)
    difference = max(differences) if exact else sum(differences) / len(differences)
    reference, moved = canary, 0.0
    if previous is not None and previous.checksum != checksum and previous.logprobs == generation.logprobs:
        reference = previous.canary  # so that small changes of several versions add up
        moved = max(abs(a - b) for a, b in zip(canary.logprobs, reference.logprobs, strict=False))
    problem = warning = None
    unchanged = "its log-probs of a fixed prompt did not change with the weights"
    if len(generation.token_ids) != len(canary.token_ids):
        problem = f"the reply has {len(generation.token_ids)} tokens instead of {len(canary.token_ids)}"
    elif moved > (_MIN_CHANGE * tolerance if exact else tolerance):
        problem = unchanged
    elif not difference <= limit:  # also true for NaN
        text = (
            f"its log-probs of a fixed prompt differ from the trainer's by {difference:.2g} "
            f"(tolerance {limit:.3g})"
        )
        passes = difference <= max(_PROBLEM * tolerance, _FAR * limit)
        problem, warning = (None, text) if passes else (text, None)
    elif moved > _MIN_CHANGE * tolerance:
        warning = unchanged
    return CanaryResult(
        checksum=checksum,
        canary=reference,
        logprobs=generation.logprobs,
        difference=difference,
        first_difference=difference if first is None and problem is None else first,
        warning=warning,
        problem=problem,
    )


def _differences(canary: Canary, generation: Generation) -> list[float]:
    """Return the absolute log-prob difference of each token, up to the first token that differs.

    If another token than the trainer's is the most likely one, a log-prob differs by at least half the margin
    between the trainer's two most likely tokens.
    """
    differences = [float("inf")] if not generation.token_ids else []
    margins = canary.margins or [0.0] * len(canary.token_ids)
    pairs = zip(
        canary.token_ids, generation.token_ids, canary.logprobs, generation.logprobs, margins, strict=False
    )
    for expected, token, ours, theirs, margin in pairs:
        if expected != token:
            differences.append(max(abs(ours - theirs), margin / 2))
            break
        differences.append(abs(ours - theirs))
    return differences
