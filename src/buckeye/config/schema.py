"""JSON Schemas of the configuration files, for editors."""

from __future__ import annotations

from typing import Any

from buckeye.config.base import BaseConfig
from buckeye.config.source import BASES
from buckeye.config.structure import all_classes

_BASES_SCHEMA = {
    "type": "array",
    "items": {"type": "string"},
    "description": "Files, relative to this one, whose settings this section builds on.",
}
_NONE = {"const": "None", "description": "None, in TOML."}


def json_schema(model: type[BaseConfig]) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a file that is read with `@ FILE`.

    Nothing is required, since every file may be completed by others or by flags; aliases are accepted, and
    the text "None" where null is.
    """
    schema = model.model_json_schema()
    definitions = schema.get("$defs", {})
    for name, definition in definitions.items():
        _complete(definition, _class_named(model, name))
    _complete(schema, model)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _class_named(model: type[BaseConfig], name: str) -> type[BaseConfig]:
    return next(cls for cls in all_classes(model) if cls.__name__ == name)


def _complete(definition: dict[str, Any], model: type[BaseConfig]) -> None:
    definition.pop("required", None)
    properties = definition.get("properties", {})
    for part in properties.values():
        options = part.get("anyOf", [])
        if {"type": "null"} in options:
            options.append(_NONE)
    for alias, name in model.aliases.items():
        properties[alias] = {
            **properties[name],
            "description": f"Another name of {name}.",
            "deprecated": True,
        }
    properties[BASES] = _BASES_SCHEMA
