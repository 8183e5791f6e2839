"""MCP server over raw HTTP, in threads of the tests."""

import itertools
import json
from contextlib import contextmanager

from tests.local_server import LocalServer, QuietHandler


@contextmanager
def mcp_by_http(tools, call, intercept=lambda handler, request: False):
    """Serve MCP; yield the address and the headers of all requests received until now.

    `call` returns a text for a session and the parameters of a tool call. `intercept` may answer a request
    differently, and returns True if it did.
    """
    received, sessions = [], itertools.count()

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            received.append({name.lower(): value for name, value in self.headers.items()})
            request = json.loads(self.body())
            session = self.headers.get("Mcp-Session-Id") or f"session-{next(sessions)}"
            if intercept(self, request):
                return
            if "id" not in request:
                self.answer(202, b"")
                return
            reply = {"jsonrpc": "2.0", "id": request["id"], **outcome(session, request)}
            headers = {"Content-Type": "application/json", "Mcp-Session-Id": session}
            self.answer(200, json.dumps(reply).encode(), **headers)

        def do_GET(self):
            self.answer(405, b"")

        do_DELETE = do_GET

    def outcome(session, request):
        if request["method"] == "initialize":
            version = request["params"]["protocolVersion"]
            about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "raw", "version": "1"}}
            return {"result": {"protocolVersion": version, **about}}
        if request["method"] == "tools/list":
            return {"result": {"tools": tools}}
        if request["method"] == "tools/call":
            return {"result": {"content": [{"type": "text", "text": call(session, request["params"])}]}}
        return {"error": {"code": -32601, "message": "none"}}

    with LocalServer(Handler) as server:
        yield f"{server.url}/mcp", received
