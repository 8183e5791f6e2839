"""What all configuration classes have in common."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, model_validator
from pydantic_core import PydanticCustomError

from buckeye.config.settings import KeyPath, Place, dotted, flag_of

# Problems of a configuration, and how they are put to the person who wrote it.

Level = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something wrong with the setting at `path` (empty: with the whole), written at `place` if it was
    written at all. A warning lets the run go on."""

    path: KeyPath = ()
    place: Place | None = None
    message: str
    level: Level = "error"

    def __str__(self) -> str:
        """One message: where, what, what to do."""
        where = self.place.text if self.place is not None else None
        if where is not None and where.replace("_", "-") == flag_of(self.path):
            return f"{where}: {self.message}"
        return ": ".join(part for part in (where, dotted(self.path), self.message) if part)


def report(problems: Iterable[Problem]) -> str:
    """All problems as one text, each once, a paragraph each."""
    texts = list(dict.fromkeys(map(str, problems)))
    if len(texts) == 1:
        return texts[0]
    return "\n".join([f"{len(texts)} problems in the configuration", *(f"  {_indent(t)}" for t in texts)])


def _indent(text: str) -> str:
    return text.replace("\n", "\n  ")


def closest(word: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """The names among `known` that `word` may have been meant as, best first."""
    names = {name.lower(): name for name in known}
    wanted = word.lower().replace("-", "_")
    found = difflib.get_close_matches(wanted, names, n=count, cutoff=0.6)
    initials = "".join(part[:1] for part in wanted.split("_"))
    kin = [n for n in names if n == initials or (len(wanted) > 2 and (wanted in n or n in wanted.split("_")))]
    return [names[name] for name in dict.fromkeys([*found, *kin])][:count]


def did_you_mean(names: Sequence[str]) -> str:
    """A sentence that offers the names; empty without any."""
    return f" Did you mean {' or '.join(names)}?" if names else ""


# What all configuration classes have in common.

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
