"""Convert the text of a flag to a value."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from buckeye.config.config_files import load_json
from buckeye.config.structure import Shape


def is_none(text: str, shape: Shape) -> bool:
    """Return True if the setting may be None and the text is `None` or `null`."""
    return shape.optional and text in ("None", "null")


def parse_bool(text: str) -> bool | None:
    """Return True or False for the texts `true` and `false`, and None for other texts."""
    return {"true": True, "false": False}.get(text.lower())


def parse_text(text: str, shape: Shape) -> Any:
    """Return the value of `text` for the expected `shape`.

    A text that does not fit the shape is returned unchanged, and the validation reports it. Raise
    `ValueError` for invalid JSON if the shape allows only JSON.
    """
    if is_none(text, shape):
        return None
    if shape.tables or shape.free is not None:
        value = _parse_json(text)
        if not isinstance(value, dict):
            raise ValueError(f'expected a JSON object such as {{"name": value}}, not {text}')
        return value
    if shape.element is not None:
        return _parse_list(text, shape.element)
    if shape.scalars or shape.choices:
        return _parse_scalar(text, shape)
    return _parse_any(text)


def _parse_scalar(text: str, shape: Shape) -> Any:
    if bool in shape.scalars and (value := parse_bool(text)) is not None:
        return value
    for number in (int, float):
        if number in shape.scalars:
            with suppress(ValueError):
                return number(text)
    return text


def _parse_list(text: str, element: Shape) -> list[Any]:
    if element.tables or text.lstrip().startswith("["):
        value = _parse_json(text)
        return value if isinstance(value, list) else [value]
    return [parse_text(item.strip(), element) for item in text.split(",")] if text.strip() else []


def _parse_json(text: str) -> Any:
    try:
        return load_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}: {text!r}") from None


def _parse_any(text: str) -> Any:
    """Return the value of an argument of any type: a JSON value, None, True, False, or else the text."""
    constants: dict[str, Any] = {"None": None, "True": True, "False": False}
    if text in constants:
        return constants[text]
    try:
        return load_json(text)
    except (ValueError, RecursionError):
        return text
