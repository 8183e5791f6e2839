"""An MCP server over HTTP that wants a key."""

import json
import uuid

from tests.local_server import LocalServer, QuietHandler

TOOLS = ("setup", "act", "evaluate")


def mcp_server(key):
    """An MCP server that refuses requests without the header `X-Key: key`. Acting pays 0.5."""
    sessions = {}

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def send(self, value, status=200, **headers):
            body = b"" if value is None else json.dumps(value).encode()
            self.answer(status, body, Content_Type="application/json", **headers)

        def do_GET(self):
            self.send(None, 405)

        def do_DELETE(self):
            self.send(None, 200)

        def do_POST(self):
            request = json.loads(self.body())
            if self.headers["X-Key"] != key:
                return self.send({"error": "no key"}, 401)
            if "id" not in request:
                return self.send(None, 202)
            session = self.headers.get("Mcp-Session-Id") or uuid.uuid4().hex
            result = self.result(request, sessions.setdefault(session, []))
            answer = {"jsonrpc": "2.0", "id": request["id"], "result": result}
            return self.send(answer, Mcp_Session_Id=session)

        def result(self, request, acts):
            if request["method"] == "initialize":
                info = {"name": "test", "version": "1"}
                capabilities = {"tools": {}}
                return {"protocolVersion": "2025-06-18", "capabilities": capabilities, "serverInfo": info}
            if request["method"] == "tools/list":
                return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in TOOLS]}
            name, arguments = request["params"]["name"], request["params"].get("arguments")
            if name == "act":
                acts.append(arguments)
            texts = {"setup": "The door is shut.", "act": f"You did {arguments}.", "evaluate": "graded"}
            structured = {"reward": 0.5 * bool(acts)} if name == "evaluate" else {}
            return {"content": [{"type": "text", "text": texts[name]}], "structuredContent": structured}

    return LocalServer(Handler)
