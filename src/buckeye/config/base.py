"""What all configuration classes have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Discriminator
from pydantic_core import PydanticCustomError

CONFLICT = "conflict"
"""The pydantic error type of `conflict`."""


class BaseConfig(BaseModel):
    """Immutable settings. Keys that are no fields are errors; the string under a field is its help text.

    `aliases` maps names of an earlier version to the field that they mean; `load_config` applies it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, defer_build=True
    )
    aliases: ClassVar[Mapping[str, str]] = {}


def conflict(message: str, *fields: str) -> PydanticCustomError:
    """An error for settings that do not go together, to raise in a validator; `fields` are those settings."""
    return PydanticCustomError(CONFLICT, "{message}", {"message": message, "fields": list(fields)})


def variant(default: str) -> Discriminator:
    """Tells the classes of a union apart by `type`, which may be left out for the default one."""

    def tag(value: Any) -> str | None:
        if isinstance(value, dict):
            return str(value.get("type", default))
        return getattr(value, "type", None)

    return Discriminator(tag)
