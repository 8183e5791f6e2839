"""Read the reward and the metrics in the result of a call of evaluate_tool."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from buckeye.mcp.client.errors import EvaluateError
from buckeye.mcp.client.session import CallResult

REWARD_KEYS = ("reward", "grade", "score")
_MAX_METRICS = 32


def decode_result(result: CallResult) -> Any:
    """Return the structured content of a call's result, or its text parsed as JSON, or None.

    SDKs wrap a plain return value in an object whose only key is `result`. Return the value of this key.
    """
    value = result.structured
    if isinstance(value, Mapping) and list(value) == ["result"]:
        value = value["result"]
    if value is None or isinstance(value, str):
        try:
            value = json.loads(result.text if value is None else value)
        except (ValueError, RecursionError):
            return None
    return value


def parse_reward(tool: str, result: CallResult) -> tuple[float, dict[str, float]]:
    """Return the reward in the result of an evaluation call, and the other numbers in the result as metrics.

    The reward is the value of `reward`, `grade` or `score` in an object, or the result itself. Booleans count
    as 0 and 1. Raises EvaluateError if the call failed or returned no finite reward.
    """
    if result.is_error:
        raise EvaluateError(f"{tool} failed: {_quote(result.text)}")
    value = decode_result(result)
    numbers: dict[str, float] = {}
    if isinstance(value, Mapping):
        if value.get("isError") is True or value.get("is_error") is True:
            raise EvaluateError(f"{tool} reports a failure: {_quote(result.text)}")
        numbers = _finite_numbers(value)
        key = next((key for key in REWARD_KEYS if key in value), None)
        value = None if key is None else value[key]
    if not isinstance(value, bool | int | float):
        shown = _quote(result.text or json.dumps(result.structured, default=str))
        raise EvaluateError(
            f"{tool} returned no reward: {shown}",
            code="BK-ENV-REWARD",
            hint=f"return a number, or an object with a number as {' or '.join(REWARD_KEYS)}",
        )
    reward = _finite(value)
    if reward is None:
        raise EvaluateError(f"{tool} returned the reward {value}, not a finite number", code="BK-ENV-REWARD")
    return reward, numbers


def _finite_numbers(value: Mapping[str, Any]) -> dict[str, float]:
    numbers = {
        str(key): _finite(item)
        for key, item in value.items()
        if key not in REWARD_KEYS and isinstance(item, bool | int | float)
    }
    finite = [(key, number) for key, number in numbers.items() if number is not None]
    return dict(finite[:_MAX_METRICS])


def _finite(value: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _quote(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "…")
