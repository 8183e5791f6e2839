"""Describe JSON Schema parameters as text for a model's prompt, and make example values for them."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

_TAG = re.compile(r"<(?=[/|!?A-Za-z])([^<>]{0,80})>")
_LOOSE_TAG = re.compile(r"<(?=\s*[/|]?\s*(?:tool|think|result|im_|\|))", re.I)
_ANSI = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])|\x9b[0-?]*[ -/]*[@-~]"
)
_CHOICES = re.compile(
    r"(?:[^:]{0,60}:\s*)?((?:[\w-]+,\s*)+(?:or\s+|and\s+)?[\w-]+|[\w-]+(?:,\s*[\w-]+)*,?\s+or\s+[\w-]+)\.?"
)
_FOR_EXAMPLE = re.compile(
    r"(?:e\.g\.|i\.e\.|for example|such as|for instance|like|example:)[\s,:]*(['\"`])([^'\"`]{1,60})\1", re.I
)
_IN_BRACKETS = re.compile(r"\((['\"`])([\w-]{1,30})\1\)")
_FORMS = {"HH:MM:SS": "12:00:00", "HH:MM": "12:00", "YYYY-MM-DD": "2026-01-31"}
_MAX_CHOICES = 12
_MAX_CHOICES_CHARS = 300
_MAX_DEFAULT_CHARS = 60
_MAX_DEPTH = 6
_OR_NULL = " or null"
_PLACEHOLDERS = {
    "uri": "https://example.com",
    "url": "https://example.com",
    "email": "someone@example.com",
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "ipv4": "127.0.0.1",
    "hostname": "example.com",
}

Schema = Mapping[str, Any]


class NoExampleError(ValueError):
    """A schema that does not determine an example value. The message is the reason."""


def sanitize_text(text: str) -> str:
    """Return untrusted text as one safe line.

    Remove terminal codes and invisible characters. Replace the brackets of tags, so that the text cannot
    contain a call: `<tool>` becomes `‹tool›`.
    """
    text = _ANSI.sub("", text)
    visible = "".join(sign for sign in text if sign in "\n\r\t" or unicodedata.category(sign)[0] != "C")
    line = " ".join(visible.split())
    return _LOOSE_TAG.sub("‹", _TAG.sub(r"‹\1›", line))


def format_literal(value: Any) -> str:
    """Return a value in the syntax of a call, with escapes for `<` and invisible characters."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(f"\\u{ord(sign):04x}" if sign == "<" else _escape_invisible(sign) for sign in text)


def _escape_invisible(sign: str) -> str:
    hidden = sign != " " and unicodedata.category(sign)[0] in "CZ"
    return json.dumps(sign)[1:-1] if hidden else sign


def describe_type(schema: Any, root: Schema, *, optional: bool = False) -> str:
    """Return the type of a parameter as text, such as `integer`, `"up" | "down"` or `array of string`.

    Omit ` or null` for an `optional` parameter, because the model can omit the parameter.
    """
    text = _type_text(schema, root, 0)
    return text.removesuffix(_OR_NULL) if optional else text


def object_marks_optional(schema: Any, root: Schema) -> bool:
    """Return True if `describe_type` marks an optional field of an object with a question mark."""
    return '"?: ' in describe_type(schema, root)


def describe_default(schema: Schema) -> str:
    """Return ` = 3` for a parameter with default 3; "" without a default, or if the default is too long."""
    if schema.get("default") is None:
        return ""
    text = format_literal(schema["default"])
    return f" = {text}" if len(text) <= _MAX_DEFAULT_CHARS else ""


def make_example(schema: Any, root: Schema) -> Any:
    """Return a value that probably fits the schema. Raises NoExampleError."""
    return _example(schema, root, 0)


def choices(schema: Any, root: Schema) -> list[Any]:
    """Return the possible values: the enumeration, or the words of a description like "up, down or left"."""
    schema = resolve_reference(schema, root)
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    if schema.get("type") != "string" or "default" in schema:
        return []
    match = _CHOICES.fullmatch(sanitize_text(str(schema.get("description") or "")))
    words = re.split(r",\s*(?:or\s+|and\s+)?|\s+or\s+", match[1]) if match is not None else []
    return [word for word in words if word]


def _type_text(schema: Any, root: Schema, depth: int) -> str:
    schema = resolve_reference(schema, root)
    if depth > _MAX_DEPTH:
        return "any"
    if "const" in schema:
        return format_literal(schema["const"])
    if isinstance(schema.get("enum"), list):
        return _enum_text(schema["enum"])
    if schema.get("nullable") is True:  # OpenAPI 3.0
        return _union([_type_text({**schema, "nullable": False}, root, depth + 1), "null"])
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        if isinstance(parts, list) and (len(parts) == 1 or key != "allOf"):
            return _union([_type_text(part, root, depth + 1) for part in parts])
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return _union([_type_text({**schema, "type": str(kind)}, root, depth + 1) for kind in kinds]) or "any"
    if kinds == "array" and (parts := _schemas_by_position(schema)):
        return f"[{', '.join(_type_text(part, root, depth + 1) for part in parts)}]"
    if kinds == "array" and schema.get("items"):
        inner = _type_text(schema["items"], root, depth + 1)
        is_several = " | " in inner or inner.endswith(_OR_NULL)
        return f"array of ({inner})" if is_several else f"array of {inner}"
    if kinds in ("object", None) and isinstance(schema.get("properties"), Mapping) and schema["properties"]:
        return _object_type_text(schema, root, depth)
    return sanitize_text(str(kinds))[:40] if kinds else "any"


def _schemas_by_position(array: Schema) -> list[Any]:
    """Return the schemas of the items of an array that has one per position, as for a tuple, else []."""
    schemas = array.get("prefixItems", array.get("items"))  # a list `items`: until draft 2019-09
    return schemas if isinstance(schemas, list) else []


def _object_type_text(schema: Schema, root: Schema, depth: int) -> str:
    """Return the fields of an object with their types. A question mark marks an optional field."""
    needed = required_names(schema)
    inside = [
        f"{format_literal(str(name))}{'' if name in needed else '?'}: {_type_text(part, root, depth + 1)}"
        f"{describe_default(resolve_reference(part, root))}"
        for name, part in list(schema["properties"].items())[:_MAX_CHOICES]
    ]
    more = ", ..." if len(schema["properties"]) > _MAX_CHOICES else ""
    return "{" + ", ".join(inside) + more + "}"


def _union(parts: Sequence[str]) -> str:
    """Return a union of types as text, with null at the end."""
    others = dict.fromkeys(part.removesuffix(_OR_NULL) for part in parts if part != "null")
    if not others:
        return "null" if parts else ""
    has_null = any(part == "null" or part.endswith(_OR_NULL) for part in parts)
    return " | ".join(others) + (_OR_NULL if has_null else "")


def _enum_text(values: Sequence[Any]) -> str:
    shown: list[str] = []
    for value in values:
        text = format_literal(value)
        if len(shown) == _MAX_CHOICES or sum(map(len, shown)) + len(text) > _MAX_CHOICES_CHARS:
            return " | ".join([*shown, f"... ({len(values)} in all)"])
        shown.append(text)
    return _union(shown) or "any"


def resolve_reference(schema: Any, root: Schema) -> Schema:
    """Return the schema that a local `$ref` names, or {} for a value that is not a schema."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for part in reference[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, Mapping) else {}
        if not isinstance(target, Mapping):
            return {}
        schema = {**target, **{key: schema[key] for key in schema if key != "$ref"}} if target else {}
    return {}


def required_names(schema: Schema) -> Sequence[Any]:
    """Return the names of the required fields of an object."""
    names = schema.get("required")
    return names if isinstance(names, list | tuple) else ()  # in draft 3, it is true or false


def _example(schema: Any, root: Schema, depth: int) -> Any:
    schema = resolve_reference(schema, root)
    if depth > _MAX_DEPTH:
        raise NoExampleError("the schema is nested too deeply")
    if "const" in schema:
        return schema["const"]
    if options := choices(schema, root):
        return options[0]
    examples = schema.get("examples")
    for value in [schema.get("default"), *(examples if isinstance(examples, list) else [])]:
        if value is not None:
            return value
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            parts = [part for part in schema[key] if resolve_reference(part, root).get("type") != "null"]
            return _example(parts[0] if parts else {"type": "null"}, root, depth + 1)
    kinds = schema.get("type")
    if isinstance(kinds, list):
        kinds = next((kind for kind in kinds if kind != "null"), "null" if kinds else None)
    return _example_of_type(kinds, schema, root, depth)


def _find_example_text(schema: Schema) -> str | None:
    """Return the example in the description, or an example of a format in the description, such as HH:MM."""
    described = sanitize_text(str(schema.get("description") or ""))
    if (match := _FOR_EXAMPLE.search(described) or _IN_BRACKETS.search(described)) is not None:
        return match[2]
    return next((text for form, text in _FORMS.items() if form in described), None)


def _example_of_type(kind: Any, schema: Schema, root: Schema, depth: int) -> Any:
    if kind in ("integer", "number"):
        return _number(schema, whole=kind == "integer")
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    if kind == "array":
        return _example_list(schema, root, depth)
    if kind == "object":
        known = schema.get("properties") or {}
        return {name: _example(known.get(name), root, depth + 1) for name in required_names(schema)}
    if (mentioned := _find_example_text(schema)) is not None:
        return mentioned
    if "pattern" in schema:
        raise NoExampleError("the text must match a pattern")
    return _PLACEHOLDERS.get(str(schema.get("format")), "." * max(3, _count(schema, "minLength")))


def _example_list(schema: Schema, root: Schema, depth: int) -> list[Any]:
    """Return a list with one item, because tools often refuse empty lists, or with the required number."""
    if schemas := _schemas_by_position(schema):
        return [_example(part, root, depth + 1) for part in schemas]
    items, least = schema.get("items"), _count(schema, "minItems")
    try:
        return [_example(items, root, depth + 1) for _ in range(least or (1 if items else 0))]
    except NoExampleError:
        if least:
            raise
        return []


def _count(schema: Schema, key: str) -> int:
    value = schema.get(key)
    count = value if isinstance(value, int) else 0
    if count > 100:
        raise NoExampleError(f"{key} is {count}")
    return count


def _number(schema: Schema, *, whole: bool) -> int | float:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    value: float = 1
    if isinstance(low, int | float):
        value = max(value, low)
    if isinstance(above, int | float) and value <= above:
        value = above + 1
    if isinstance(high, int | float):
        value = min(value, high)
    if isinstance(below, int | float) and value >= below:
        value = below - 1
    return int(value) if whole or float(value).is_integer() else value
