"""Validate the outcomes that environments return, and make the outcomes of rollouts that raise an error."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import cast

from buckeye.base.distribution import CODE_FOLDER
from buckeye.envs.base import Outcome
from buckeye.envs.stdlib_only.outcomes import (
    BOUNDARIES,
    Boundary,
    OutcomeError,
    checked_frames,
    checked_outcome,
    frames_of,
    location_of,
    outcome_error_text,
    shorten,
    strip_addresses,
)

_KEY_NAME = re.compile(r"\b[A-Z][A-Z0-9_]*_(?:KEY|TOKEN|SECRET)S?\b")
_MISSING = re.compile(r"missing|must be set|not set|credential|KeyError|not found|required", re.I)


def validate_outcome(outcome: object, environment: object = None) -> Outcome:
    """Return a validated outcome, with every number as a float.

    Instead of an invalid outcome, return an outcome with an error that names the field. If `outcome` is not
    an `Outcome`, the error names the method of `environment` that returned it. Drop the components of an
    outcome with an error.
    """
    if not isinstance(outcome, Outcome):
        return error_outcome("score", outcome_error_text(outcome, environment))
    try:
        return _validate_scored(outcome) if outcome.error is None else _validate_failed(outcome)
    except (OutcomeError, ValueError) as error:
        return error_outcome("score", str(error))


def _validate_scored(outcome: Outcome) -> Outcome:
    """Return a validated outcome with a reward.

    Raise `OutcomeError` for an invalid field, or `ValueError` if turn_rewards do not add up to the reward.
    """
    fields = checked_outcome(
        {
            "reward": outcome.reward,
            "components": outcome.components,
            "explanations": outcome.explanations,
            "stop_reason": outcome.stop_reason,
            "turn_rewards": outcome.turn_rewards,
            "handle": outcome.pending,
        }
    )
    return Outcome(
        reward=fields["reward"],
        components=fields["components"],
        stop_reason=fields["stop_reason"],
        turn_rewards=fields["turn_rewards"],
        pending=fields["handle"],
        explanations=fields["explanations"],
    )


def _validate_failed(outcome: Outcome) -> Outcome:
    stop_reason = checked_outcome({"reward": 0.0, "stop_reason": outcome.stop_reason})["stop_reason"]
    return Outcome(
        reward=None,
        stop_reason=stop_reason,
        error=shorten(strip_addresses(_message_of(outcome.error))),
        boundary=None if outcome.boundary is None else parse_boundary(outcome.boundary),
        trace=checked_frames(outcome.trace),
    )


def outcome_of_exception(boundary: Boundary, error: BaseException) -> Outcome:
    """Return the outcome of a rollout, or of the scoring of a group, that raised `error`.

    The outcome's error ends with the location in the environment's code.
    """
    trace = [] if boundary == "model" else frames_of(error, CODE_FOLDER)
    is_invalid = isinstance(error, OutcomeError)
    message = strip_addresses(
        _message_of(error) if is_invalid else f"{type(error).__name__}: {_message_of(error)}"
    )
    boundary, message = "score" if is_invalid else boundary, shorten(message)
    hint = "Await it" if "'coroutine' object" in message else missing_variable_hint(message, ())
    return error_outcome(boundary, f"{message}{location_of(trace)}{f'. {hint}' if hint else ''}", trace)


def error_outcome(boundary: Boundary, error: str, trace: Sequence[str] = ()) -> Outcome:
    """Return an outcome with an error and without a reward."""
    stop_reason = "timeout" if boundary == "timeout" else "error"
    return Outcome(reward=None, stop_reason=stop_reason, error=error, boundary=boundary, trace=trace)


def _message_of(error: object) -> str:
    """Return the message of an error, even if its class fails to produce one."""
    try:
        return str(error)
    except Exception:
        return "(the message of this error cannot be read)"


def missing_variable_hint(text: str, variables: Collection[str]) -> str:
    """Return a hint if the error message `text` reports a missing key that is not in `variables`, or ""."""
    names = [name for name in dict.fromkeys(_KEY_NAME.findall(text)) if name not in variables]
    if not names or not _MISSING.search(text):
        return ""
    return (
        f"Pass the variable to the environment: --variables {names[0]}, or "
        f'variables = ["{names[0]}"] in its [[env]] table'
    )


def parse_boundary(name: object) -> Boundary:
    """Return `name` if it is a boundary, or "step" for an unknown name."""
    return cast(Boundary, name) if name in BOUNDARIES else "step"
