"""Connect the MCP SDK to a server process, and repair invalid JSON in the messages of servers."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp_types as types
from mcp.shared.message import SessionMessage

from buckeye.base.json_lines import fix_json, parse_lenient_json
from buckeye.mcp.client.server_process import ServerProcess

_LINE_END = re.compile(rb"(?<=[\r\n])")
_DATA = re.compile(rb"data: ?")


@asynccontextmanager
async def open_stdio_streams(process: ServerProcess) -> AsyncIterator[Any]:
    """Yield the two streams through which the SDK reads and writes messages of a process.

    Count and drop lines that are not messages. If such a line has a request id, fail that request.
    """
    inbox, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, outbox = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with inbox:
                while (line := await process.read_line()) is not None:
                    messages, is_garbage = read_messages(line)
                    if is_garbage:
                        process.note_garbage(line)
                    for message in messages:
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


def read_messages(line: bytes) -> tuple[list[types.JSONRPCMessage], bool]:
    """Return the messages in a line, and True if a part of the line is not a message.

    An invalid object with an id and without a method becomes an error response with this id. The request then
    fails at once instead of at its timeout.
    """
    try:
        return [types.jsonrpc_message_adapter.validate_json(line, by_name=False)], False
    except ValueError:
        value = parse_lenient_json(line)
    messages: list[types.JSONRPCMessage] = []
    is_garbage = not value or not isinstance(value, dict | list)
    for item in value if isinstance(value, list) else [value]:  # MCP 2025-03-26 has batches
        if not isinstance(item, dict) or not item.keys() & {"id", "method"}:
            is_garbage = True
            continue
        try:
            messages.append(types.jsonrpc_message_adapter.validate_python(item, by_name=False))
        except ValueError:
            is_garbage = True
            messages += _invalid_response_error(item)
    return messages, is_garbage


def _invalid_response_error(response: dict[str, Any]) -> Iterator[types.JSONRPCError]:
    """Yield an error response with the request id of an invalid response, if it has an id."""
    request_id = None if "method" in response else response.get("id")
    if isinstance(request_id, int | str) and not isinstance(request_id, bool):
        text = json.dumps(response, ensure_ascii=False)[:200]
        error = types.ErrorData(code=types.PARSE_ERROR, message=f"the response is not an MCP message: {text}")
        yield types.JSONRPCError(jsonrpc="2.0", id=request_id, error=error)


class JsonRepairStream:
    """Repairs the JSON messages in an HTTP response body, so that the SDK can read them.

    Pass each chunk of the body to `feed`, and call `rest` at the end of the body. Both return repaired bytes.
    """

    def __init__(self, content_type: str) -> None:
        self._is_stream = content_type.lower().startswith("text/event-stream")
        self._is_json = content_type.lower().startswith("application/json")
        self._waiting = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """Add a chunk of the body, and return the new complete messages, repaired."""
        if not (self._is_json or self._is_stream):
            return chunk
        self._waiting += chunk
        if self._is_json or not (b"\n" in chunk or b"\r" in chunk):
            return b""
        *lines, rest = _LINE_END.split(bytes(self._waiting))
        self._waiting = bytearray(rest)
        return b"".join(map(_fix_event, lines))

    def rest(self) -> bytes:
        """Return the repaired remainder at the end of the body."""
        waiting = bytes(self._waiting)
        return fix_json(waiting) if self._is_json else _fix_event(waiting)


def _fix_event(line: bytes) -> bytes:
    prefix = _DATA.match(line)
    if prefix is None:
        return line
    content = line[prefix.end() :].rstrip(b"\r\n")
    return prefix[0] + fix_json(content) + line[prefix.end() + len(content) :]
