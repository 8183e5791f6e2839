"""Make JSON Schemas of configuration files, which editors use to check and complete the files."""

from __future__ import annotations

from typing import Any

from buckeye.config.shared import BaseConfig

_NONE = {"const": "None", "description": "None, in TOML."}


def json_schema(model: type[BaseConfig]) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a configuration file, which commands read with `@ FILE`.

    No setting is required, because other files or flags may complete the file. Where null is allowed, the
    text "None" is, too.
    """
    schema = model.model_json_schema()
    definitions = schema.get("$defs", {})
    for definition in (schema, *definitions.values()):
        _relax(definition)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _relax(definition: dict[str, Any]) -> None:
    definition.pop("required", None)
    for part in definition.get("properties", {}).values():
        options = part.get("anyOf", [])
        if {"type": "null"} in options:
            options.append(_NONE)
