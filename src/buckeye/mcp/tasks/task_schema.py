"""Schema of a task of an MCP environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from buckeye.config.shared import BaseConfig
from buckeye.mcp.grading.grader_parser import Graders, as_list

NAME, ARGUMENTS = "name", "arguments"
NonEmpty = Annotated[str, Field(min_length=1)]


class ToolCall(BaseConfig):
    """One call of an MCP tool."""

    name: NonEmpty
    """Name of the tool."""
    arguments: dict[str, Any] = {}
    """Arguments in the form of the file. `call_arguments` converts them to the form of the tool."""


Calls = Annotated[list[ToolCall], BeforeValidator(as_list)]
"""Calls in order: one call or a list."""


def _replace_null(metadata: Any) -> Any:
    return {} if metadata is None else metadata


class StdioServer(BaseConfig):
    """MCP server that runs as a process and communicates over standard input and output."""

    command: NonEmpty
    """Name or path of the program."""
    args: list[str] = []
    """Arguments of the program."""
    env: dict[str, str] = {}
    """Environment variables of the process. `$NAME` in a value becomes the value of the variable NAME."""
    cwd: NonEmpty | None = None
    """Working directory. Default: the rollout's folder."""


class HttpServer(BaseConfig):
    """MCP server that receives requests over streamable HTTP."""

    url: Annotated[str, Field(pattern=r"^(https?://|\$)")]
    """URL of the server."""
    headers: dict[str, str] = {}
    """Headers of every request. `$NAME` in a value becomes the value of the variable NAME."""


def _kind(server: Any) -> Literal["stdio", "http"] | None:
    """Return the kind of a server, or None unless it has exactly one of `url` and `command`."""
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
    """One task: prompt, servers and grading.

    A task contains the names of variables, such as $BUCKEYE_API_KEY, and not their values. It is therefore
    safe to log and store a task. Each rollout replaces the variables when it opens its sessions.
    """

    id: NonEmpty
    """Name of the task, unique in the file."""
    prompt: NonEmpty
    """Prompt for the model."""
    mcp_config: Annotated[dict[str, Server], Field(min_length=1)]
    """MCP servers whose tools the model may call, by name."""
    setup_tool: Calls = []
    """Calls that prepare the environment before the first turn, in order."""
    evaluate_tool: Calls = []
    """Calls that grade the final state, in order. The last result has the reward. Optional with graders."""
    grade: Graders = []
    """Grader or list of graders, in addition to the graders of the configuration.

    A grader of the task replaces the grader of the configuration with the same name.
    """
    files: NonEmpty | None = None
    """Path of the initial content of the rollout's folder. Overrides `files` of the configuration."""
    metadata: Annotated[dict[str, Any], BeforeValidator(_replace_null)] = {}
    """Additional data, for example for `{metadata.NAME}` in graders."""


def call_arguments(call: ToolCall, input_schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call in the form that the tool expects.

    `input_schema` is the tool's JSON Schema. If the tool has the parameters `name` and `arguments`, convert
    `{"name": function, "param": value}` to `{"name": function, "arguments": {"param": value}}`. If the tool
    has `name` but not `arguments`, convert in the other direction.
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
