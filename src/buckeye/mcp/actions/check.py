"""Checks `action_mappings` and turns it into actions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from buckeye.config.problems import Problem, closest, did_you_mean
from buckeye.config.shared import BaseConfig, conflict
from buckeye.mcp.actions.expressions import Transform, compile_transform
from buckeye.mcp.actions.mapping import Action, Constant, FromArg, FromArgs, Source
from buckeye.mcp.actions.operations import ExpressionError
from buckeye.mcp.problems import problems_of

DONE = "done"
"""The action that ends a rollout. It is there in every configuration."""
RESERVED_TOOLS = ("setup", "evaluate")
"""Tools that prepare and grade, which no action may stand for, of whichever server."""
_NAME = re.compile(r"[^\W\d][\w.\-/]*")
_PARAMETER = re.compile(r"[^\W\d][\w.-]*")
_SPECIAL = ("_tool", "_parser")
_KINDS = ("static", "from_arg", "from_args")


def _named(value: Any) -> Any:
    if not isinstance(value, str) or not _PARAMETER.fullmatch(value):
        raise conflict(f"{value!r} is no name of an argument")
    return value


def _all_different(names: list[str]) -> list[str]:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise conflict(f"{name!r} is there twice", str(index))
    return names


ArgumentName = Annotated[str, BeforeValidator(_named)]
ArgumentNames = Annotated[list[ArgumentName], AfterValidator(_all_different)]


class StaticArgument(BaseConfig):
    """A constant that is an object, or looks like one of the other kinds."""

    static: Any
    """A constant of any kind."""


class OneArgument(BaseConfig):
    """An argument that is made from one of the action."""

    from_arg: ArgumentName
    """The argument of the action."""
    default: Any = None
    """Its value if it is not given; without one it is left out."""
    transform: str | None = None
    """An expression, as `lambda x: x * 1000`."""
    use_context: StrictBool = False
    """Whether the transform also takes all arguments of the call."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.use_context and self.transform is None:
            raise conflict("there is no transform that could use it", "use_context")
        self.compiled()
        return self

    def compiled(self) -> Transform | None:
        """The transform, checked."""
        if self.transform is None:
            return None
        try:
            return compile_transform(self.transform, use_context=self.use_context)
        except ExpressionError as error:
            raise conflict(str(error), "transform") from None


class SeveralArguments(BaseConfig):
    """A list that is made from several arguments of the action."""

    from_args: Annotated[ArgumentNames, Field(min_length=1)]
    """The arguments of the action."""
    defaults: list[Any] = Field(default_factory=list)
    """A value for each that is not given."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.defaults) not in (0, len(self.from_args)):
            raise conflict(f"expected a list of {len(self.from_args)} values, one for each name", "defaults")
        return self


def _one_kind(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    kinds = [kind for kind in _KINDS if kind in value]
    if not kinds:
        near = did_you_mean([name for key in value for name in closest(key, _KINDS, count=1)][:1])
        raise conflict(f"expected static, from_arg or from_args; for an object write static: {{...}}.{near}")
    if len(kinds) > 1:
        raise conflict(f"it has {' and '.join(kinds)}; keep one")
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
    BeforeValidator(_one_kind),
]


class ActionParser(BaseConfig):
    """How the arguments of an action are read."""

    positional: ArgumentNames = Field(default_factory=list)
    """The arguments that may be given without a name, in order."""


def _arguments_are_named(schema: dict[str, Any]) -> None:
    schema["patternProperties"] = {"^[^_]": schema["additionalProperties"]}
    schema["additionalProperties"] = False


class ActionTable(BaseConfig):
    """What an action stands for: a tool, and a constant or what it is made from for each argument of it."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_arguments_are_named)
    __pydantic_extra__: dict[str, Argument]
    tool: Annotated[str, Field(min_length=1)] | None = Field(
        alias="_tool", json_schema_extra={"not": {"pattern": f"(^|/)({'|'.join(RESERVED_TOOLS)})$"}}
    )
    """The MCP tool; null ends the rollout."""
    parser: ActionParser = Field(ActionParser(), alias="_parser")
    """How its arguments are read."""

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        for key in values:
            if key.startswith("_") and key not in _SPECIAL:
                raise conflict(f"no such key.{did_you_mean(closest(key, _SPECIAL))}", key)
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tool is not None and self.tool.rpartition("/")[2] in RESERVED_TOOLS:
            said = f"{self.tool} prepares or grades the environment; the model must not call it"
            raise conflict(said, "_tool")
        return self


def compile_actions(raw: Mapping[str, Any]) -> tuple[dict[str, Action], list[Problem]]:
    """The actions, `done` among them, and what is wrong with the others."""
    actions: dict[str, Action] = {}
    problems: list[Problem] = []
    for name, value in raw.items():
        if not _NAME.fullmatch(name):
            problems.append(Problem(path=(name,), message=f"{name!r} is no name that can be called"))
        elif not isinstance(value, Mapping):
            said = "expected a table with _tool and the arguments of that tool"
            problems.append(Problem(path=(name,), message=said))
        else:
            try:
                actions[name] = _action(name, ActionTable.model_validate(value))
            except ValidationError as error:
                found = problems_of(ActionTable, value, error)
                problems += [Problem(path=(name, *one.path), message=one.message) for one in found]
    if DONE not in raw:
        actions[DONE] = Action(name=DONE, tool=None)
    return actions, problems


def _action(name: str, table: ActionTable) -> Action:
    sources = {key: _source(value) for key, value in table.__pydantic_extra__.items()}
    return Action(name=name, tool=table.tool, positional=tuple(table.parser.positional), sources=sources)


def _source(value: Any) -> Source:
    if isinstance(value, OneArgument):
        default = (value.default,) if "default" in value.model_fields_set else ()
        return FromArg(name=value.from_arg, default=default, transform=value.compiled())
    if isinstance(value, SeveralArguments):
        return FromArgs(names=tuple(value.from_args), defaults=tuple(value.defaults))
    return Constant(value.static if isinstance(value, StaticArgument) else value)
