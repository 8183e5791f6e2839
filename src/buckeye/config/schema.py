"""JSON Schemas for editors."""

from __future__ import annotations

from typing import Any

from buckeye.config.base import BaseConfig


def json_schema(model: type[BaseConfig]) -> dict[str, Any]:
    """The schema of a configuration file: older names of settings and `toml_files` are accepted as well."""
    schema = model.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for part in (schema, *schema.get("$defs", {}).values()):
        _add_aliases(part)
    schema["properties"]["toml_files"] = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "description": "Files to inherit from, relative to this one.",
    }
    return schema


def _add_aliases(part: dict[str, Any]) -> None:
    for model in _all_models():
        if part.get("title") != model.__name__:
            continue
        for older, name in model.aliases.items():
            part["properties"][older] = {**part["properties"][name], "deprecated": True}


def _all_models() -> list[type[BaseConfig]]:
    found, queue = [], list(BaseConfig.__subclasses__())
    while queue:
        model = queue.pop()
        found.append(model)
        queue += model.__subclasses__()
    return found
