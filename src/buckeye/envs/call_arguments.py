"""Arguments of a tool call, in the many forms that models, clients and data sets write."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from buckeye.config.config_files import load_json


def read_arguments(written: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object. "" and null mean no arguments. JSON text inside JSON text
    is decoded.

    Raise `ValueError` with a text that completes "the arguments of NAME".
    """
    found = _json_of(written)
    if isinstance(found, str):
        with suppress(ValueError):
            found = _json_of(found)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError("must be an object")
    return found


def _json_of(written: Any) -> Any:
    """Return the value of JSON text, or of a JSON-compatible value; None for an empty text."""
    try:
        value = written
        if isinstance(written, str):
            value = load_json(written) if written.strip() else None
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # half a surrogate pair raises
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"are not valid JSON: {reason}") from None
    return value
