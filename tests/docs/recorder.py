"""A server that notes everything that is sent to it, and answers chats."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Recorder:
    """`sent` are the requests: their lines, headers and bodies, as text."""

    def __init__(self, reply="<think>I guess.</think><tool>done()</tool>"):
        self.sent = []
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode(errors="replace")
                recorder.sent.append(f"{self.requestline}\n{self.headers}\n{body}")
                message = {"role": "assistant", "content": reply}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
                self._answer(answer | {"choices": [choice], "usage": usage})

            def do_GET(self):
                recorder.sent.append(f"{self.requestline}\n{self.headers}")
                self._answer({"object": "list", "data": [{"id": "m", "object": "model"}]})

            def _answer(self, content):
                raw = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
