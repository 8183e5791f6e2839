"""The base of every configuration class."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


class BaseConfig(BaseModel):
    """Frozen; unknown keys are errors; the string "None" means None; attribute docstrings are the help text.

    `aliases` maps older names of a field to its name. They are replaced before validation, where files and
    flags are read, so that messages can still quote what was written.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )

    aliases: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _none_strings(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: None if value == "None" else value for key, value in data.items()}
