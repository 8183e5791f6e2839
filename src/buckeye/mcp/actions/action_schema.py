"""Validation of `action_mappings` and their conversion to actions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    Tag,
    WithJsonSchema,
    model_validator,
)

from buckeye.config.problems import closest, did_you_mean
from buckeye.config.shared import BaseConfig, conflict
from buckeye.mcp.actions.expressions import Transform, compile_transform
from buckeye.mcp.actions.operations import ExpressionError

DONE = "done"
"""Name of the action that ends a rollout. Every configuration has it."""
RESERVED_TOOLS = ("setup", "evaluate")
"""Tools that prepare and grade an environment. No action may map to them, on any server."""
_NAME = re.compile(r"[^\W\d][\w.\-/]*")
_PARAMETER = re.compile(r"[^\W\d][\w.-]*")
_SPECIAL = ("_tool", "_parser")
_KINDS = ("static", "from_arg", "from_args")


def _check_name(value: Any) -> Any:
    if not isinstance(value, str) or not _PARAMETER.fullmatch(value):
        raise conflict(f"{value!r} is not a valid argument name")
    return value


def _check_unique(names: list[str]) -> list[str]:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise conflict(f"{name!r} appears twice", str(index))
    return names


ArgumentName = Annotated[str, BeforeValidator(_check_name)]
ArgumentNames = Annotated[list[ArgumentName], AfterValidator(_check_unique)]


class StaticArgument(BaseConfig):
    """Constant `{static: VALUE}`. Only a constant object needs this form, as other objects are sources."""

    static: Any
    """The constant, of any type."""


class OneArgument(BaseConfig):
    """Argument of the tool that comes from one argument of the action."""

    from_arg: ArgumentName
    """Name of the action's argument."""
    default: Any = None
    """Value if the model omits the argument. Without a default, the call omits the tool's argument too."""
    transform: str | None = None
    """Expression that changes the value, such as `lambda x: x * 1000`."""
    use_context: StrictBool = False
    """Pass all arguments of the call to the transform as a second parameter."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.use_context and self.transform is None:
            raise conflict("needs a transform", "use_context")
        _ = self.compiled
        return self

    @cached_property
    def compiled(self) -> Transform | None:
        """Compiled transform, or None. Raises a validation error for an invalid expression."""
        if self.transform is None:
            return None
        try:
            return compile_transform(self.transform, use_context=self.use_context)
        except ExpressionError as error:
            raise conflict(str(error), "transform") from None


class SeveralArguments(BaseConfig):
    """Argument of the tool that is a list of several arguments of the action."""

    from_args: Annotated[ArgumentNames, Field(min_length=1)]
    """Names of the action's arguments."""
    defaults: list[Any] = Field(default_factory=list)
    """Default value for each argument of `from_args`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.defaults) not in (0, len(self.from_args)):
            raise conflict(f"expected a list of {len(self.from_args)} values, one for each name", "defaults")
        return self


def _check_kind(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    kinds = [kind for kind in _KINDS if kind in value]
    if not kinds:
        near = did_you_mean([name for key in value for name in closest(key, _KINDS, count=1)][:1])
        message = "expected static, from_arg or from_args; for an object write static: {...}"
        raise conflict(f"{message}.{near}" if near else message)
    if len(kinds) > 1:
        raise conflict(f"has {' and '.join(kinds)}; keep one")
    return value


def _kind(value: Any) -> str:
    kinds = [kind for kind in _KINDS if isinstance(value, Mapping) and kind in value]
    return f"with {kinds[0]}" if kinds else "constant"


_CONSTANTS = ["string", "number", "boolean", "array", "null"]
Argument = Annotated[
    Annotated[StaticArgument, Tag("with static")]
    | Annotated[OneArgument, Tag("with from_arg")]
    | Annotated[SeveralArguments, Tag("with from_args")]
    | Annotated[Any, WithJsonSchema({"type": _CONSTANTS}), Tag("constant")],
    Discriminator(_kind),
    BeforeValidator(_check_kind),
]


class ActionParser(BaseConfig):
    """Parsing of an action's arguments."""

    positional: ArgumentNames = Field(default_factory=list)
    """Arguments that may be passed by position, in order."""


def _arguments_are_named(schema: dict[str, Any]) -> None:
    schema["patternProperties"] = {"^[^_]": schema["additionalProperties"]}
    schema["additionalProperties"] = False


class ActionTable(BaseConfig):
    """One action: the name of its MCP tool, and a value or a source for each argument of the tool."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_arguments_are_named)
    __pydantic_extra__: dict[str, Argument]
    tool: Annotated[str, Field(min_length=1)] | None = Field(
        alias="_tool", json_schema_extra={"not": {"pattern": f"(^|/)({'|'.join(RESERVED_TOOLS)})$"}}
    )
    """Name of the MCP tool. null: the action ends the rollout."""
    parser: ActionParser = Field(ActionParser(), alias="_parser")
    """Parsing of the arguments."""

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        for key in values:
            if key.startswith("_") and key not in _SPECIAL:
                near = did_you_mean(closest(key, _SPECIAL)) or f" Use one of: {', '.join(_SPECIAL)}"
                raise conflict(f"no such key.{near}", key)
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tool is not None and self.tool.rpartition("/")[2] in RESERVED_TOOLS:
            message = f"{self.tool} prepares or grades the environment; the model must not call it"
            raise conflict(message, "_tool")
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """An action that the model may call. An action with `tool` None ends the rollout."""

    name: str
    tool: str | None
    positional: tuple[str, ...] = ()
    sources: Mapping[str, Any] = field(default_factory=dict)
    """Maps each argument of the tool to its `Argument`, which yields the value."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the arguments, positional ones first."""
        others = (name for source in self.sources.values() for name in source_names(source))
        return tuple(dict.fromkeys((*self.positional, *others)))


def source_names(source: Any) -> Sequence[str]:
    """Return the names of the action's arguments that `source` reads."""
    if isinstance(source, OneArgument):
        return (source.from_arg,)
    return source.from_args if isinstance(source, SeveralArguments) else ()


def _check_action_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        hint = "begin with a letter, and use letters, digits and ._-/"
        raise conflict(f"{name!r} is not a valid action name", hint=hint)
    return name


def _check_table(action: Any) -> Any:
    if not isinstance(action, Mapping | ActionTable):
        raise conflict("expected a table with _tool and the arguments of that tool")
    return action


ActionTables = dict[
    Annotated[str, AfterValidator(_check_action_name)], Annotated[ActionTable, BeforeValidator(_check_table)]
]
"""Value of `action_mappings`."""


def build_actions(tables: Mapping[str, ActionTable]) -> dict[str, Action]:
    """Return the actions of `action_mappings`, and the action `done`."""
    actions = {
        name: Action(
            name=name,
            tool=table.tool,
            positional=tuple(table.parser.positional),
            sources=table.__pydantic_extra__,
        )
        for name, table in tables.items()
    }
    return {**actions, DONE: actions.get(DONE, Action(name=DONE, tool=None))}
