"""Read the arguments of a tool call in the various forms that models, clients and datasets write."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from buckeye.config.config_files import load_json


def read_arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of a call as a dictionary.

    "" and null mean no arguments. Decode a JSON text whose value is again a JSON text.

    Raise `ValueError` for other values. The message has no subject, for example "must be an object". The
    caller adds the subject, for example "the arguments of NAME".
    """
    arguments = _parse_json(value)
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = _parse_json(arguments)
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise ValueError("must be an object")
    return arguments


def _parse_json(value: Any) -> Any:
    """Return the value of a JSON text, None for an empty text, or another JSON value unchanged."""
    try:
        if isinstance(value, str):
            value = load_json(value) if value.strip() else None
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # a lone surrogate raises
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"are not valid JSON: {reason}") from None
    return value
