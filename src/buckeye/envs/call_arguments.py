"""Arguments of a tool call, in the many forms that models, clients and data sets write."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from buckeye.config.config_files import load_json


def read_arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object.

    "" and null mean no arguments. JSON text inside JSON text is decoded.

    Raise `ValueError`. Its text is the end of a sentence that begins with "the arguments of NAME".
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
    """Return the value of JSON text, or a JSON-compatible value unchanged; None for an empty text."""
    try:
        if isinstance(value, str):
            value = load_json(value) if value.strip() else None
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # a lone surrogate raises
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"are not valid JSON: {reason}") from None
    return value
