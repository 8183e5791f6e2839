"""Tolerant JSON parsing of server messages, and the message streams that the SDK reads and writes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp_types as types
from mcp.shared.message import SessionMessage

from buckeye.base.json_lines import parse_lenient_json
from buckeye.mcp.client.server_process import ServerProcess


@asynccontextmanager
async def open_stdio_streams(process: ServerProcess) -> AsyncIterator[Any]:
    """Yield the read and write streams that the SDK needs, connected to a process.

    Lines that are not messages are counted and dropped. A dropped line with a request id fails that request.
    """
    inbox, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, outbox = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with inbox:
                while (line := await process.read_line()) is not None:
                    if (message := read_message(line)) is None:
                        process.note_garbage(line)
                    else:
                        await inbox.send(SessionMessage(message))

    async def write() -> None:
        async with outbox:
            async for item in outbox:
                try:
                    text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                    await process.write_line(text.encode())
                except ConnectionError:
                    await inbox.aclose()  # no response will arrive
                    return

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(write)
        try:
            yield incoming, outgoing
        finally:
            tasks.cancel_scope.cancel()
            for stream in (inbox, incoming, outgoing, outbox):
                stream.close()


def read_message(line: bytes) -> types.JSONRPCMessage | None:
    """Return the message in a line, or None.

    An invalid object with an id and no method becomes an error response with that id, so that the request
    fails at once.
    """
    try:
        return types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        value = parse_lenient_json(line)
    if not isinstance(value, dict) or not value.keys() & {"id", "method"}:
        return None
    try:
        return types.jsonrpc_message_adapter.validate_python(value, by_name=False)
    except ValueError:
        return _invalid_response_error(value)


def _invalid_response_error(response: dict[str, Any]) -> types.JSONRPCError | None:
    """Return an error in place of an invalid response, if it has a request id."""
    request_id = None if "method" in response else response.get("id")
    if not isinstance(request_id, int | str) or isinstance(request_id, bool):
        return None
    text = json.dumps(response, ensure_ascii=False)[:200]
    error = types.ErrorData(code=types.PARSE_ERROR, message=f"the response is not an MCP message: {text}")
    return types.JSONRPCError(jsonrpc="2.0", id=request_id, error=error)
