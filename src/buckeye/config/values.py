"""From the text of a flag or of an environment variable to a value."""

from __future__ import annotations

from typing import Any

from buckeye.config.source import load_json
from buckeye.config.structure import Shape

NONE_WORDS = ("None", "null")
_BOOLS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


def is_none(text: str, shape: Shape) -> bool:
    """Whether the text stands for None here."""
    return shape.optional and text in NONE_WORDS


def parse_bool(text: str) -> bool | None:
    """True or false; None if the text is neither."""
    return {**_BOOLS, "1": True, "0": False}.get(text.lower())


def parse_text(text: str, shape: Shape) -> Any:
    """The value that `text` stands for where `shape` is expected.

    Text that is not of the expected type stays text, for validation to complain about. Raises ValueError
    where only JSON can be meant and it is not valid.
    """
    if is_none(text, shape):
        return None
    if shape.tables or shape.free is not None:
        return _json_object(text)
    if shape.element is not None:
        return _list(text, shape.element)
    if shape.scalars or shape.choices:
        return _scalar(text, shape)
    return _anything(text)


def _scalar(text: str, shape: Shape) -> Any:
    if bool in shape.scalars and (value := parse_bool(text)) is not None:
        return value
    for number in (int, float):
        if number in shape.scalars:
            try:
                return number(text)
            except ValueError:
                continue
    return text


def _list(text: str, element: Shape) -> list[Any]:
    inner = text.strip()
    if inner.startswith(("[", "{")):
        try:
            value = load_json(inner)
        except (ValueError, RecursionError) as error:
            if element.tables:
                raise ValueError(_not_json(inner, error)) from None
        else:
            return value if isinstance(value, list) else [value]
        inner = inner.removeprefix("[").removesuffix("]")
    elif element.tables:
        raise ValueError(f'{text!r} is no JSON; a list of sections is written as \'[{{"id": "..."}}]\'')
    return [parse_text(item.strip(), element) for item in inner.split(",")] if inner.strip() else []


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = load_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(_not_json(text, error)) from None
    if not isinstance(value, dict):
        raise ValueError(f"expected settings as JSON, as '{{\"name\": value}}', not {text}")
    return value


def _not_json(text: str, error: Exception) -> str:
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return f"{text!r} is not valid JSON: {reason}"


def _anything(text: str) -> Any:
    """A value for code that is not ours: JSON or Python words where it reads as such, text otherwise."""
    words: dict[str, Any] = {"None": None, "True": True, "False": False}
    if text in words:
        return words[text]
    try:
        return load_json(text)
    except (ValueError, RecursionError):
        return text
