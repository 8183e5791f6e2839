"""Sessions over streamable HTTP, with a server in raw HTTP that misbehaves in the way it is told."""

import asyncio
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from buckeye.mcp.client.errors import BadAnswer, OutputFlood, SessionLost, StartError, ToolTimeout
from buckeye.mcp.client.session import Deadlines, open_session
from buckeye.mcp.tasks.task_schema import HttpServer

DEADLINES = Deadlines(start=60.0, call=60.0, close=1.0)
QUICK = Deadlines(start=60.0, call=1.0, close=1.0)
TOOL = {"name": "act", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}}


class Stopped(Exception):
    """The server closes the connection without an answer."""


@contextmanager
def http_server(way=""):
    """Yields the address and the headers of every request so far."""
    headers = []
    over = threading.Event()

    def result_of(request):
        if request["method"] == "initialize":
            version = request["params"]["protocolVersion"]
            info = {"name": "raw", "version": "1"}
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        if request["method"] == "tools/list":
            return {"tools": [TOOL]}
        if request["method"] != "tools/call":
            return None
        text = "x" * 20_000_000 if way == "huge" else "done"
        if way == "hang":
            over.wait()
        if way == "drop":
            raise Stopped
        return {"content": [{"type": "text", "text": text}]}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            headers.append({name.lower(): value for name, value in self.headers.items()})
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if way == "401":
                return self.answer(401, "{}")
            if "id" not in request:
                return self.answer(202, "")
            if way == "forgets" and request["method"] == "tools/call":
                return self.answer(404, "")
            try:
                result = result_of(request)
            except Stopped:
                self.close_connection = True
                return None
            if way == "garbage" and request["method"] == "tools/call":
                return self.answer(200, "<html>")
            reply = {"jsonrpc": "2.0", "id": request["id"]}
            reply |= {"error": {"code": -32601, "message": "none"}} if result is None else {"result": result}
            return self.answer(200, json.dumps(reply))

        def do_GET(self):
            self.answer(405, "")

        do_DELETE = do_GET

        def answer(self, status, text):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Mcp-Session-Id", "abc")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):
            pass  # the client has left

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/mcp", headers
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def play(url, deadlines=DEADLINES, **headers):
    async def run():
        server = HttpServer(url=url, headers=headers)
        async with open_session("board", server, deadlines=deadlines) as session:
            return await session.call("act", {"text": "hello"})

    return asyncio.run(run())


def test_a_call_with_the_headers_of_the_task():
    with http_server() as (url, headers):
        assert play(url, **{"Mcp-Image": "org/env:1", "Authorization": "Bearer key"}).text == "done"
    assert {(sent["mcp-image"], sent["authorization"]) for sent in headers} == {("org/env:1", "Bearer key")}


@pytest.mark.parametrize(
    ("way", "error", "says"),
    [
        ("401", StartError, "401: check the key"),
        ("huge", OutputFlood, "16 MiB"),
        ("hang", ToolTimeout, "within 1 s"),
        ("drop", SessionLost, "lost"),
        ("forgets", SessionLost, "lost"),
        ("garbage", BadAnswer, "act failed"),
    ],
)
def test_a_misbehaving_server_is_a_typed_error(way, error, says):
    with http_server(way) as (url, _), pytest.raises(error) as caught:
        play(url, QUICK if way == "hang" else DEADLINES)
    assert type(caught.value) is error
    assert says in str(caught.value)
    assert "board" in str(caught.value)


def test_nobody_listens():
    with pytest.raises(StartError, match=r"http://127\.0\.0\.1:9/mcp: nothing listens there"):
        play("http://127.0.0.1:9/mcp")
