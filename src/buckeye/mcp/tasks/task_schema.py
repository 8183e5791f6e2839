"""What a task of an MCP environment is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from buckeye.config.settings import dotted
from buckeye.config.shared import BaseConfig, conflict
from buckeye.mcp.grading.reading import read_graders
from buckeye.mcp.grading.schema import Grader

NAME, ARGUMENTS = "name", "arguments"
NonEmpty = Annotated[str, Field(min_length=1)]


class ToolCall(BaseConfig):
    """One call of an MCP tool."""

    name: NonEmpty
    """The tool."""
    arguments: dict[str, Any] = {}
    """Its arguments, as they are written in the file; see `call_arguments`."""


class StdioServer(BaseConfig):
    """An MCP server that is started as a process and spoken to by its standard input and output."""

    command: NonEmpty
    """The program."""
    args: list[str] = []
    """Its arguments."""
    env: dict[str, str] = {}
    """Variables of its environment. They may mention others, as $NAME."""
    cwd: NonEmpty | None = None
    """The folder that it starts in; by default the rollout's own."""


class HttpServer(BaseConfig):
    """An MCP server that is spoken to by streamable HTTP."""

    url: Annotated[str, Field(pattern=r"^(https?://|\$)")]
    """Its address."""
    headers: dict[str, str] = {}
    """Headers of every request. They may mention variables, as $NAME."""


def _kind(server: Any) -> Literal["stdio", "http"] | None:
    """Which of the two a server is; None for neither and for both."""
    if isinstance(server, StdioServer | HttpServer):
        return "stdio" if isinstance(server, StdioServer) else "http"
    if not isinstance(server, Mapping) or ("url" in server) == ("command" in server):
        return None
    return "http" if "url" in server else "stdio"


Server = Annotated[
    Annotated[StdioServer, Tag("stdio")] | Annotated[HttpServer, Tag("http")],
    Discriminator(
        _kind,
        custom_error_type="server",
        custom_error_message="expected an object with either url (HTTP) or command (stdio)",
    ),
]


class McpTask(BaseConfig):
    """One task: what the model is asked, where it acts, and how the end is graded.

    Holds the text of the file: variables such as $BUCKEYE_API_KEY are resolved when a session is opened,
    never here, so a task can be logged and stored.
    """

    id: NonEmpty
    """Its name, unique in a file."""
    prompt: NonEmpty
    """What the model is asked."""
    mcp_config: Annotated[dict[str, Server], Field(min_length=1)]
    """The servers it acts on, by name."""
    setup_tool: list[ToolCall] = []
    """Calls that prepare the environment, in this order."""
    evaluate_tool: list[ToolCall] = []
    """Calls that grade the end, in this order; the last one's result is the reward. May be left out where
    there are graders."""
    grade: Any = None
    """Graders, one or a list; beside those of the configuration, or in the place of one of the same name."""
    files: NonEmpty | None = None
    """What the folder of a rollout begins with, instead of the `files` of the configuration."""
    metadata: dict[str, Any] = {}
    """Anything else that is known about the task."""

    @model_validator(mode="before")
    @classmethod
    def _accept_one_call(cls, values: Any) -> Any:
        """One call stands for a list of one, and null for nothing."""
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        for field in ("setup_tool", "evaluate_tool"):
            if isinstance(values.get(field), Mapping | ToolCall):
                values[field] = [values[field]]
        for field in ("setup_tool", "evaluate_tool", "metadata"):
            if field in values and values[field] is None:
                del values[field]
        return values

    @model_validator(mode="after")
    def _check_grade(self) -> Self:
        for problem in read_graders(self.grade)[1]:
            raise conflict(f"{dotted(('grade', *problem.path))}: {problem.message}", "grade")
        return self

    @property
    def graders(self) -> Sequence[Grader]:
        """The graders of `grade`."""
        return read_graders(self.grade)[0]


def call_arguments(call: ToolCall, input_schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call in the form that the tool takes.

    A dispatching tool takes `{"name": function, "arguments": {...}}`. For it, the flat form
    `{"name": function, "param": value}` is nested; for a tool with flat parameters, the nested form is
    flattened. `input_schema` is the tool's JSON Schema.
    """
    given = dict(call.arguments)
    known = input_schema.get("properties") or {}
    if NAME not in given or NAME not in known:
        return given
    if ARGUMENTS in known and ARGUMENTS not in given:
        inner = {key: given.pop(key) for key in list(given) if key not in known}
        return {**given, ARGUMENTS: inner}
    if ARGUMENTS not in known and isinstance(given.get(ARGUMENTS), dict):
        inner = given.pop(ARGUMENTS)
        return {**inner, **given}
    return given
