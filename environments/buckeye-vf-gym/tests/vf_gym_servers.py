"""A chat server that says what it is told to, and an MCP server over HTTP that wants a key."""

import json
import threading
import uuid
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOOLS = ("setup", "act", "evaluate")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def read(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def send(self, value, status=200, **headers):
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {
            "Content-Type": "application/json",
            "Content-Length": len(body),
            **headers,
        }.items():
            self.send_header(name.replace("_", "-"), str(text))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(handler):
    """The address of a server with this handler, on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def chat_server(replies):
    """Answers with the reply that comes after as many as are in the conversation."""

    class Handler(_Handler):
        def do_POST(self):
            said = sum(message["role"] == "assistant" for message in self.read()["messages"])
            message = {"role": "assistant", "content": replies[min(said, len(replies) - 1)]}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            answer = {"id": "a", "object": "chat.completion", "created": 1, "model": "scripted"}
            self.send({**answer, "choices": [choice], "usage": usage})

    return serving(Handler)


def mcp_server(key):
    """An MCP server that refuses requests without the header `X-Key: key`. Acting pays 0.5."""
    sessions = {}

    class Handler(_Handler):
        def do_GET(self):
            self.send(None, 405)

        def do_DELETE(self):
            self.send(None, 200)

        def do_POST(self):
            request = self.read()
            if self.headers["X-Key"] != key:
                return self.send({"error": "no key"}, 401)
            if "id" not in request:
                return self.send(None, 202)
            session = self.headers.get("Mcp-Session-Id") or uuid.uuid4().hex
            result = self.result(request, sessions.setdefault(session, []))
            return self.send(
                {"jsonrpc": "2.0", "id": request["id"], "result": result}, Mcp_Session_Id=session
            )

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

    return serving(Handler)
