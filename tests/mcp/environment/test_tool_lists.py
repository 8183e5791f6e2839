"""Lists of tools in pages, and the ways in which servers end them."""

import asyncio
from types import SimpleNamespace

import mcp_types as types
import pytest

from buckeye.mcp.client.errors import BadAnswerError
from buckeye.mcp.client.session import McpSession, SessionTimeouts
from buckeye.mcp.tasks.task_schema import StdioServer


def _listed(cursor_after):
    """The names of the tools that a server lists, which answers the cursor X with the tool `tool-X` and the
    cursor `cursor_after(X)`; and the cursors that it was asked for."""
    asked = []

    async def list_tools(*, cursor):
        asked.append(cursor)
        tool = types.Tool(name=f"tool-{cursor}", input_schema={"type": "object"})
        return types.ListToolsResult(tools=[tool], next_cursor=cursor_after(cursor))

    session = McpSession("pages", StdioServer(command="none"), SessionTimeouts(), (), preload=False)
    session._client = SimpleNamespace(list_tools=list_tools)
    return [*asyncio.run(session._list_tools())], asked


@pytest.mark.parametrize(
    ("following", "asked"),
    [
        ({None: "a", "a": "b", "b": None}, [None, "a", "b"]),
        ({None: ""}, [None]),
        ({None: "a", "a": ""}, [None, "a"]),
        ({None: "a", "a": "a"}, [None, "a"]),
        ({None: "a", "a": "b", "b": "a"}, [None, "a", "b"]),
    ],
)
def test_tool_list_ends_without_or_with_earlier_cursor(following, asked):
    assert _listed(following.get) == ([f"tool-{cursor}" for cursor in asked], asked)


def test_endless_tool_list_is_error():
    with pytest.raises(BadAnswerError):
        _listed(lambda cursor: f"{cursor}+")
