"""What all configuration classes have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Discriminator, model_validator
from pydantic_core import PydanticCustomError

CONFLICT = "conflict"
"""The pydantic error type of `conflict`."""


class BaseConfig(BaseModel):
    """Immutable settings. Keys that are no fields are errors; the string under a field is its help text.

    `aliases` maps names of an earlier version to the field that they mean; `load_config` applies it. Of a
    class that is chosen by its `type`, `known_as` maps names for that in papers and other systems to what is
    to be written here; messages about such a name say it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, defer_build=True
    )
    aliases: ClassVar[Mapping[str, str]] = {}
    known_as: ClassVar[Mapping[str, str]] = {}


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


class OwnFunctionConfig(BaseConfig):
    """A function of your own."""

    import_path: str
    """Where it is: `module:function`, or `path/to/file.py:function`."""
    kwargs: dict[str, Any] = {}
    """Its further arguments."""

    @model_validator(mode="after")
    def _names_a_function(self) -> Self:
        module, _, function = self.import_path.rpartition(":")
        if not module or not function.isidentifier():
            raise conflict(
                f"import_path = {self.import_path!r} names no function; write module:function or "
                "path/to/file.py:function",
                "import_path",
            )
        return self
